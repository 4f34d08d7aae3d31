"""Command-line verbs that need the export layer."""
