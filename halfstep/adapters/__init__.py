"""What people already have, run on sessions: apex and torch.amp loops, and scripts with no mixed precision at all."""
