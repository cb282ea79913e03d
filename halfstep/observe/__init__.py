"""What the numbers did: statistics, probes, and the recorder behind blame."""
