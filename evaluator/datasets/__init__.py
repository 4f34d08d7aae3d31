"""A folder or an archive of images as labeled samples."""

from .dataset import Dataset, DatasetSpec, Reader, Sample
from .open import open_dataset, open_from_spec, open_images
from .selection import parse_class_selection, select

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
