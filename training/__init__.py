"""Architectures, training and checkpoints of PReLU-nets."""

if __name__ != "prelunet.training":  # found beside a checkout's own files; its modules would be loaded twice
    raise ImportError("import prelunet.training instead of training")
