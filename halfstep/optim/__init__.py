"""How updates keep the precision that low weights lack: masters, halfstep's own update, any optimizer on masters."""
