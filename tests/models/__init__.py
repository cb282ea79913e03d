"""Small versions of models that people train, and whether each trains at every level."""
