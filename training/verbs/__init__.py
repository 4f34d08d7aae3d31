"""Command-line verbs of the training layer."""
