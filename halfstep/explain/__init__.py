"""Explanation: what broke, where and why, what would, and the reports."""
