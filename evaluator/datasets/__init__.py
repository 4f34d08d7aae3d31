"""A folder or an archive of images as labelled samples."""

from evaluator.datasets.opening import open_dataset
from evaluator.datasets.sample import Dataset, Reader, Sample

__all__ = ["Dataset", "Reader", "Sample", "open_dataset"]
