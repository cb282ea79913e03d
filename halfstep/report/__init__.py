"""Records and plans as tables for the terminal, as JSON, as a log of a run, as a page, and live."""
