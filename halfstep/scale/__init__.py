"""HOW 2, the range of gradients: loss scales, which scale each gradient carries, the test for non-finite values."""
