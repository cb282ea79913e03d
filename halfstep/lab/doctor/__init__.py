"""`halfstep doctor`: measures what a machine does in each format, and recommends a level and format for training."""
