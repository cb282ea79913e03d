"""Measurement: benchmarks, this machine, the time of one step, and small real jobs."""
