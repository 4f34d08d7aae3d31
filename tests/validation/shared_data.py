"""Images, datasets, results and helpers that several tests of validation use."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.datasets.open import open_dataset
from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.pipeline import ChunkResult
from tests.helpers.fakes import FakeSession, fake_contract

CLASSES = [entry.wnid for entry in fake_contract().classes]
CENTER = build_protocol("center", fake_contract())
TWO_SCALES = build_protocol("dense-29-36", fake_contract())
IMAGES, BAD = 53, (7, 30, 31, 32, 52)  # damaged: in portions of one to three images whole portions are
SHARED_CANVASES = BatchRules(canvas_step=16, max_windows=5000, max_pixels=15_000, switch_pixels=20_000)
RESULT = ("run.json", "predictions.jsonl", "scores.f32.npy")
WAIT = 20.0  # seconds; timeout for waiting for another thread


def write_images(folder: Path, wnids: Sequence[str], images: int, *, enlarged: int = 1) -> Path:
    """Write noise of 12 sizes, evenly into the folders of the classes. enlarged: repetitions of each pixel per side."""
    rng = np.random.default_rng(5)
    for index in range(images):
        path = folder / wnids[index * len(wnids) // images] / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (29 + index % 4 * 9, 30 + index % 3 * 13, 3), np.uint8)
        Image.fromarray(pixels.repeat(enlarged, axis=0).repeat(enlarged, axis=1)).save(path)
    return folder


def write_dataset(folder: Path) -> Dataset:
    """Write 53 images into the folders of four classes; five are damaged."""
    write_images(folder, [CLASSES[index] for index in (0, 2, 3, 5)], IMAGES)
    for path in folder.rglob("*.png"):
        if int(path.stem) in BAD:
            path.write_bytes(b"no image")
    return open_dataset(folder, split="val", wnids=CLASSES)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of a run's results."""
    return {name: (folder / name).read_bytes() for name in RESULT}


def no_thread_is_left() -> Iterator[None]:
    """Check that a test ends all threads it started; an autouse fixture in each file."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) - before == set()  # a thread of an earlier test may end meanwhile


class RecordingReader:
    """A reader that appends each file name to `seen` and calls `before` with it."""

    def __init__(self, dataset: Dataset, before: Callable[[str], None] = lambda _file: None) -> None:
        self.seen: list[str] = []
        self._reader, self._before = dataset.reader, before

    def read(self, file: str) -> bytes:
        self.seen.append(file)
        self._before(file)
        return self._reader.read(file)


def chunks_of(samples: Sequence[Sample], size: int) -> list[Sequence[Sample]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def count_until_error(results: Iterator[ChunkResult], error: type[BaseException], match: str) -> int:
    """Return the number of chunks before the error."""
    given: list[ChunkResult] = []
    with pytest.raises(error, match=match):
        given.extend(results)
    return len(given)


class IrregularSession(FakeSession):
    """Sleep for a random short time."""

    def compute(self, staged: Any) -> Outputs:
        time.sleep(0.004 * (hash((len(self.calls), id(self))) % 3))
        return super().compute(staged)
