"""Damaged messages and pictures against the server."""
