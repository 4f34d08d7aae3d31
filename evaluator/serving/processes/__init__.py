"""Several processes that serve the same models on the same ports, and the parent that starts them."""
