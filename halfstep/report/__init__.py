"""Shows records and plans: as tables in the terminal, as JSON, as run logs, as HTML pages, and live."""
