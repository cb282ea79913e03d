"""Explains failures: which operation made the first non-finite number, why, and which edit of the plan cures it."""
