"""Loops that are compiled at first use and limited by memory bandwidth; they take tensors and numbers, not plans."""
