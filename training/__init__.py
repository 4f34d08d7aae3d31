"""Architectures, training and checkpoints of PReLU-nets."""
