"""Weights trained elsewhere, as a checkpoint."""
