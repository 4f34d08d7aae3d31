"""Finds the preprocessing that a net was trained with, from labeled images or from outputs of the original pipeline."""
