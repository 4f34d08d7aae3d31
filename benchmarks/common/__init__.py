"""Shared by several benchmarks: nets, photos, results, server processes."""
