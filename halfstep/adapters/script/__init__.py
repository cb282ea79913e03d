"""`halfstep run`: trains unmodified scripts, written without mixed precision, under a plan."""
