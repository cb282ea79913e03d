"""Runs existing code under halfstep: apex and torch.amp loops, trainers, and scripts without mixed precision."""
