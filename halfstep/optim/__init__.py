"""How updates keep the precision that low weights lack: masters, an own update, and any optimizer on masters."""
