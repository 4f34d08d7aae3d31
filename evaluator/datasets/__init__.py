"""A folder or an archive of images as labelled samples."""

from evaluator.datasets.opening import open_dataset, open_images, open_place
from evaluator.datasets.sample import Dataset, DatasetPlace, Reader, Sample
from evaluator.datasets.selection import classes_asked, select

__all__ = [
    "Dataset", "DatasetPlace", "Reader", "Sample",
    "classes_asked", "open_dataset", "open_images", "open_place", "select",
]  # fmt: skip
