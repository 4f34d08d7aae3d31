"""The training step, the loader and parallel training."""
