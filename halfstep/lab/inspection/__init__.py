"""`inspect`: where the time, the FLOPs and the casts of one training step go, and which edits would save time."""
