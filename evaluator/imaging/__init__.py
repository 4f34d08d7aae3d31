"""Bytes to arrays ready for the graph: decode, resize, views, canvas."""
