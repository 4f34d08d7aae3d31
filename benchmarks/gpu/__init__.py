"""Dense evaluation and training on a GPU, in resumable parts."""
