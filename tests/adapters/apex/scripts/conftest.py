"""What lies here are scripts that tests run, not tests."""

collect_ignore_glob = ["*.py"]
