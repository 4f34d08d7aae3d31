"""Fixtures of several test files: exported discriminating nets, created once a session."""

import fcntl
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import settings

from prelunet.evaluator.architectures import Activation
from prelunet.evaluator.contract import Canvas, ModelContract
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.session import Session
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.net.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from tests.helpers.discriminating_nets import discriminating_checkpoint

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the servers that tests start would ignore it
settings.register_profile("default", deadline=None)  # of an example: a busy machine is no failure
settings.load_profile("default")


def pytest_collection_finish() -> None:
    """Spare garbage collections what collecting the tests has created: it is never freed, and takes 0.4 s to visit."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class ExportedNet:
    """A discriminating checkpoint, its model file, and a CPU session on it."""

    name: str
    checkpoint: Checkpoint
    checkpoint_path: Path
    path: Path
    session: Session

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """Return the checkpoint's tensors in float64; for a large net the conversion takes seconds."""
        return {name: tensor.astype(np.float64) for name, tensor in self.checkpoint.tensors.items()}


def export_discriminating(
    name: str, mean: str, folder: Path, *, activation: Activation = "prelu", canvas: Canvas = "ragged"
) -> ExportedNet:
    """Create, write, export and load a discriminating checkpoint."""
    path = folder / f"{name}.safetensors"
    write_checkpoint(path, discriminating_checkpoint(name, mean=mean, activation=activation))
    export_checkpoint(path, path.with_suffix(".onnx"), canvas)
    return _loaded(name, folder)


def _loaded(name: str, folder: Path) -> ExportedNet:
    """Load the files that `export_discriminating` wrote."""
    path = folder / f"{name}.safetensors"
    model = path.with_suffix(".onnx")
    return ExportedNet(name, read_checkpoint(path), path, model, open_session(model, "cpu"))


def with_contract(session: Session, contract: ModelContract) -> Session:
    """Return a session on the same file that states another contract."""
    other = copy(session)
    other.contract = contract
    return other


Shared: TypeAlias = "Callable[[str, Callable[[Path], object]], Path]"


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Return how to have a folder filled once for all processes that run tests: by its name, and what writes into it.

    Tests only read it.
    """
    own = tmp_path_factory.getbasetemp()
    base = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    base.mkdir(exist_ok=True)

    def folder(name: str, write: Callable[[Path], object]) -> Path:
        place, done = base / name, base / f"{name}.done"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                place.mkdir(exist_ok=True)
                write(place)
                done.touch()
        return place

    return folder


class _ExportedNets(dict[str, ExportedNet]):
    """Exports a net at its first use."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def __missing__(self, key: str) -> ExportedNet:
        name, variant = key.split("-")
        activations: dict[str, Activation] = {"shared": "prelu-shared", "relu": "relu", "lrelu": "lrelu"}

        def write(folder: Path) -> None:
            export_discriminating(
                name,
                "channel" if variant == "channel" else "image",
                folder,
                activation=activations.get(variant, "prelu"),
                canvas="exact" if variant == "exact" else "ragged",
            )

        self[key] = _loaded(name, self.shared(f"exported-{key}", write))
        return self[key]


@pytest.fixture(scope="session")
def exported(shared: Shared) -> dict[str, ExportedNet]:
    """Return exported nets by name: `slimA-image`, `slimE-image`, `demo-relu`, `demo-exact`, ..."""
    return _ExportedNets(shared)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> Iterator[None]:
    """Handle SIGINT as at a terminal, also in processes that tests start: under nohup and & it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of models A, C and E unless they are requested."""
    if not os.environ.get("LARGE"):
        for item in items:
            if item.get_closest_marker("large"):
                item.add_marker(pytest.mark.skip(reason="models A, C and E take minutes and 6 GB: make test LARGE=1"))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape invalid UTF-8 in reports, which some tests log: the processes that run tests could not send it."""
    return _escaped((yield))


def _escaped(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode(errors="backslashreplace").decode()
    if isinstance(data, list | tuple):
        return type(data)(_escaped(part) for part in data)
    return {key: _escaped(value) for key, value in data.items()} if isinstance(data, dict) else data
