"""The session: the only part of halfstep that changes models and optimizers; it can undo every change."""
