"""Benchmarks: the same work under several plans and under torch.amp, compared in speed, memory and accuracy."""
