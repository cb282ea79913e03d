"""The session: the only part of halfstep that touches a model or an optimizer, and it can undo all that it did."""
