"""The training loop, from setup to the last checkpoint."""
