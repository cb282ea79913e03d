"""A read of gradients as the two numbers that most tests look at."""

from halfstep.train.scale.norm import read


def global_norm(grads):
    """Returns the L2 norm over all elements and whether any is infinite or NaN."""
    reading = read(list(grads))
    return reading.norm, reading.found
