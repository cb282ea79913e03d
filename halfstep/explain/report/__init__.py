"""Shows and stores records and plans: terminal tables, a live progress line, JSON, run logs and HTML pages."""
