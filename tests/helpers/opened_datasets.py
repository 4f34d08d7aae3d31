"""Datasets opened with the classes of the tiny datasets, and why one is refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets import Dataset, DatasetSpec, open_from_spec
from prelunet.evaluator.errors import DatasetError
from tests.helpers.tiny_datasets import CLASSES


def opened(path: Path, labels: Path | None = None, classes: Sequence[ClassEntry] = CLASSES, **options: Any) -> Dataset:
    """Open a dataset as `validate` does; options: further fields of the DatasetSpec."""
    return open_from_spec(DatasetSpec(path, labels, **options), classes)


def refusal(path: Path, labels: Path | None = None, classes: Sequence[ClassEntry] = CLASSES) -> str:
    """Return the message with which a dataset is refused."""
    with pytest.raises(DatasetError) as refused:
        opened(path, labels, classes)
    return str(refused.value)
