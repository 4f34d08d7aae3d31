"""Experiments on the paper's claims."""
