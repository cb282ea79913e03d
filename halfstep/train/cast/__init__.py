"""Casts tensors to the formats of a plan, in ops and at module boundaries; emulates a format that the device lacks."""
