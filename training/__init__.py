"""Architectures, training and checkpoints of PReLU-nets."""

if __name__ != "prelunet.training":  # imported from the repository root; modules would be loaded twice
    raise ImportError("import prelunet.training instead of training")
