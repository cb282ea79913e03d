"""Explains failures: which operation made the first non-finite number, why, and which edit of the plan cures it.

Users call `blame` for this. The guardian of a session does it automatically when steps keep being skipped.
"""
