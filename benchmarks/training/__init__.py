"""The training step, its input and several processes."""
