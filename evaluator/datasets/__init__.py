"""A folder or an archive of images as labeled samples."""

from prelunet.evaluator.datasets.dataset import Dataset, DatasetSpec, Reader, Sample
from prelunet.evaluator.datasets.open import open_dataset, open_from_spec, open_images
from prelunet.evaluator.datasets.selection import parse_class_selection, select

__all__ = [
    "Dataset",
    "DatasetSpec",
    "Reader",
    "Sample",
    "open_dataset",
    "open_from_spec",
    "open_images",
    "parse_class_selection",
    "select",
]  # fmt: skip
