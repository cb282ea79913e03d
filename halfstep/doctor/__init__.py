"""`halfstep doctor`: what a machine is and does in each format, measured, and what to train in because of it."""
