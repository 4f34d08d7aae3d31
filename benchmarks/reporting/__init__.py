"""Reports on a dataset of ImageNet's size."""
