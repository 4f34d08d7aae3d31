"""A folder or an archive of images as labelled samples."""

from prelunet.evaluator.datasets.dataset import Dataset, DatasetPlace, Reader, Sample
from prelunet.evaluator.datasets.open import open_dataset, open_images, open_place
from prelunet.evaluator.datasets.selection import classes_asked, select

__all__ = [
    "Dataset", "DatasetPlace", "Reader", "Sample",
    "classes_asked", "open_dataset", "open_images", "open_place", "select",
]  # fmt: skip
