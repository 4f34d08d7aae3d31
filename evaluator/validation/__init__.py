"""One model on one dataset with one protocol: the run folder."""
