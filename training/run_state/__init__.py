"""The files of a run, from which it can be resumed."""
