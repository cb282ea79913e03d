"""Runs existing code on sessions: apex and torch.amp loops, trainers, and scripts without any mixed precision."""
