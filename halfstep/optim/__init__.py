"""Updates low-precision weights with fp32 precision: masters, halfstep's own update, other optimizers on masters."""
