"""Observes the numbers of a training step: statistics, probes, and the recorder that blame uses."""
