"""Loops that run at the speed of memory, compiled at first use; they know tensors and numbers, but no plan."""
