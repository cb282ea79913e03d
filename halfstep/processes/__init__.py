"""The only package that deals with several processes: gradient reduction, shards, and the one sum of a step."""
