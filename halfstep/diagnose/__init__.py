"""Which operation made the first bad number, why, and what cures it: blame and the guardian."""
