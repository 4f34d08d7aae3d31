"""Metrics, logs and call context."""
