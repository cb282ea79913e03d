"""Moments between steps: in codes with the session, in fp32 for everyone else."""
