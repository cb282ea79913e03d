"""Updates with the precision that low-precision weights lack: masters, halfstep's own update, optimizers on masters."""
