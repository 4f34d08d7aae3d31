"""Benchmarks, each run as a module from the checkout: `python -m benchmarks.engine.run`."""
