"""What the numbers did: statistics, probes, blame."""
