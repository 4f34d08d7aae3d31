"""Fixtures of the cluster tests: a model, images and a SIGTERM handler."""

import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.session import Session
from tests.conftest import ExportedNet
from tests.validation.ray.cluster_data import IMAGES, opened

TOKEN = secrets.token_hex(32)


@pytest.fixture(scope="package", autouse=True)
def authentication() -> Iterator[None]:
    """Require a token, as newer versions of Ray do. Ray reads it once in a process, at its first use."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", TOKEN)
        yield


@pytest.fixture(scope="module")
def model(exported: dict[str, ExportedNet]) -> Path:
    return exported["demo-channel"].path


@pytest.fixture(scope="module")
def session(model: Path) -> Session:
    return open_session(model, "cpu", threads=1)


@pytest.fixture(scope="module")
def data(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write images of 12 sizes into the folders of four classes; one is damaged."""
    folder = tmp_path_factory.mktemp("data") / "val"
    rng = np.random.default_rng(8)
    wnids = [session.contract.classes[index].wnid for index in (1, 4, 5, 20)]
    for index in range(IMAGES):
        path = folder / wnids[index * 4 // IMAGES] / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (30 + index % 4 * 9, 33 + index % 3 * 13, 3), np.uint8)).save(path)
    (folder / wnids[1] / "030.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def dataset(session: Session, data: Path) -> Dataset:
    return opened(session, data)


@pytest.fixture
def on_sigterm() -> Iterator[Any]:
    """Handle SIGTERM as the program does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGTERM, before)
