"""Verbs of the command line that need the export layer."""
