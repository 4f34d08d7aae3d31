"""Inspection of checkpoints and model files, layer by layer."""
