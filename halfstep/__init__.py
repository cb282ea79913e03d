"""Mixed precision training for PyTorch that says what broke, where and why, and measures what was gained."""

from halfstep.version import __version__

__all__ = ["__version__"]
