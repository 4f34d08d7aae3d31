"""The same on a GPU, in resumable parts."""
