"""Metrics, logs and the context of a call."""
