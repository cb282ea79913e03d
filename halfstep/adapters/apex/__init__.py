"""Runs scripts written for NVIDIA's apex, which had mixed precision in `apex.amp` until May 2025."""
