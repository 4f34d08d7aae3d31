"""Evaluation of a model on a dataset with a protocol, stored in a run folder."""
