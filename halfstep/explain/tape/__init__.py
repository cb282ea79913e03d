"""Seeing each operation of a step: the recorder, what it calls, and where from."""
