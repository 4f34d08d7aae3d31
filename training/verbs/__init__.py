"""Verbs of the command line that need the training layer."""
