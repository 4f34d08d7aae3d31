"""`prelunet bench`: where the time of an evaluation goes."""
