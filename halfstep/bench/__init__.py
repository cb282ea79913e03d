"""The same work under several plans and under torch.amp, side by side: speed, memory, accuracy."""
