from pathlib import Path

import pytest

from tests.training.training_folders import make_dataset


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset that no test changes."""
    return make_dataset(tmp_path_factory.mktemp("data"))
