"""What a training run keeps on disk, so that it can be resumed."""
