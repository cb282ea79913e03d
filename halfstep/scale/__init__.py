"""HOW 2, the range of gradients: no, static and dynamic scale, what scale a gradient carries, the non-finite test."""
