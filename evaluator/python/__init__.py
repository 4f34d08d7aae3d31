"""prelunet for Python programs and notebooks: load a model file, classify images, evaluate datasets, compare runs."""
