"""Training: what changes models and optimizers, and what it measures meanwhile."""
