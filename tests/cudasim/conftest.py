"""The files here that are no tests change torch or Triton for the whole process."""

collect_ignore = ["aot.py", "host.py", "__main__.py", "everywhere"]
