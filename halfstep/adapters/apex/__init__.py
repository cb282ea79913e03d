"""Runs scripts written for NVIDIA's apex, which offered mixed precision as `apex.amp` until May 2025."""

from halfstep.adapters.apex.install import install, sessions, uninstall

__all__ = ["install", "sessions", "uninstall"]
