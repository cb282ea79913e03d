"""The only package that deals with several processes: gradient reduction, shards, and one all-reduce in each step."""
