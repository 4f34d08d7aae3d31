"""What several benchmarks share: nets, photos, results, server processes."""
