"""Keeps gradients in range: loss scales, which scale each gradient carries, and the test for non-finite gradients."""
