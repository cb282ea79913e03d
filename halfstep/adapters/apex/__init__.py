"""Runs scripts written for NVIDIA's apex, which had mixed precision in `apex.amp` until May 2025."""

from halfstep.adapters.apex.install import install, sessions, uninstall

__all__ = ["install", "sessions", "uninstall"]
