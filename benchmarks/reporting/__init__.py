"""Reports of a dataset the size of ImageNet's."""
