from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Restore the number of torch's threads, which benchmarks set: it affects the last bits of later tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
