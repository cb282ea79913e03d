"""Compiled loops, limited by memory bandwidth; they take tensors and numbers, not plans."""
