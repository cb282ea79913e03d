"""Keeps gradients in range: scales losses, tracks which scale the gradients carry, and finds non-finite gradients."""
