"""A CUDA device simulated on a CPU, and what `./dev gpu-offline` runs on it."""
