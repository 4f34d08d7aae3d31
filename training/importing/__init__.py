"""Import of weights trained elsewhere."""
