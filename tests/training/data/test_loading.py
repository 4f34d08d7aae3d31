"""Batches do not depend on workers; unreadable images are named; no worker outlives its consumer."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prelunet.evaluator.errors import DatasetError, EnvironmentFault, OutOfMemory
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.training.data import loader, worker_processes
from prelunet.training.data.augmentation import SUBSTITUTE, color_shift, random_stream, training_view, view_keys_of_step
from prelunet.training.data.image_cache import ImageCache
from prelunet.training.data.loader import MAX_SUBSTITUTES, Batch, Loader
from prelunet.training.data.splits import open_splits
from prelunet.training.data.worker_processes import map_in_processes
from tests.training.training_folders import RECIPE, build_batch, make_dataset

COLORFUL = replace(RECIPE, color=0.1)
AXES = np.array([[50, 8, 1], [48, 0, -3], [46, -9, 2]], np.float32)


@pytest.fixture
def image_cache(data: Path) -> ImageCache:
    return ImageCache(open_splits(data).train, {})


def assert_equal(batch: Batch, expected: Batch) -> None:
    np.testing.assert_array_equal(batch.images, expected.images)
    np.testing.assert_array_equal(batch.labels, expected.labels)
    np.testing.assert_array_equal(batch.shift, expected.shift)
    assert (batch.images.dtype, batch.labels.dtype) == (np.uint8, np.int64)
    assert batch.unreadable == expected.unreadable


# Batches


def test_a_batch_has_the_views_labels_and_shifts_of_its_keys(image_cache: ImageCache) -> None:
    batch = build_batch(image_cache, COLORFUL, 7, axes=AXES)
    assert batch.shift is not None
    places = view_keys_of_step(COLORFUL, 7, len(image_cache))
    for row, (epoch, index) in enumerate(places):
        sample = image_cache.samples[index]
        decoded = decode_rgb(image_cache.dataset.read(sample))
        np.testing.assert_array_equal(batch.images[row], training_view(decoded, COLORFUL, epoch, index))
        np.testing.assert_array_equal(batch.shift[row], color_shift(COLORFUL, AXES, epoch, index))
        assert image_cache.dataset.classes[batch.labels[row]] == sample.file.split("/")[0]
    assert batch.unreadable == ()
    assert build_batch(image_cache, RECIPE, 7, axes=AXES).shift is None  # the recipe has no color augmentation


@pytest.mark.parametrize(
    ("first", "workers", "memory"),
    [(0, 0, 0), (0, 1, 2**30), (5, 3, 2**30), (0, 1, 0), (7, 3, 0), (11, 2, 0)],  # memory 0: processes decode
)
def test_batches_do_not_depend_on_workers_or_first_step(data: Path, first: int, workers: int, memory: int) -> None:
    dataset = open_splits(data).train
    plain = [build_batch(ImageCache(dataset, {}), COLORFUL, step, axes=AXES) for step in range(COLORFUL.total_steps)]
    batches = list(
        Loader(ImageCache(dataset, {}, memory), COLORFUL, axes=AXES, workers=workers).training_batches(first)
    )
    assert len(batches) == COLORFUL.total_steps - first
    for batch, expected in zip(batches, plain[first:], strict=True):
        assert_equal(batch, expected)


@pytest.mark.parametrize("memory", [0, 2**30])
@pytest.mark.parametrize("rows", [range(0, 2), range(2, 5), range(4, 4)])
def test_the_rows_of_a_process_are_those_of_the_global_batch(data: Path, rows: range, memory: int) -> None:
    dataset = open_splits(data).train
    recipe = replace(COLORFUL, steps=2)
    batches = Loader(ImageCache(dataset, {}, memory), recipe, axes=AXES, workers=1).training_batches(0, rows)
    for step, batch in enumerate(batches):
        whole = build_batch(ImageCache(dataset, {}), recipe, step, axes=AXES)
        assert whole.shift is not None
        part = slice(rows.start, rows.stop)
        assert_equal(batch, Batch(whole.images[part], whole.labels[part], whole.shift[part]))


def test_batches_are_the_same_from_archives(data: Path, tmp_path: Path) -> None:
    expected = list(Loader(ImageCache(open_splits(data).train, {}), RECIPE, workers=0).training_batches(9))
    for kind in ("tar", "zip"):
        path = Path(shutil.make_archive(str(tmp_path / "data"), kind, data))
        image_cache = ImageCache(open_splits(path).train, {}, memory=0)
        for batch, same in zip(Loader(image_cache, RECIPE, workers=2).training_batches(9), expected, strict=True):
            assert_equal(batch, same)


@pytest.mark.parametrize("memory", [0, 2**30])
def test_evaluation_yields_every_image_once_in_dataset_order(data: Path, memory: int) -> None:
    image_cache = ImageCache(open_splits(data).val, {}, memory)
    batches = list(Loader(image_cache, RECIPE, workers=2).evaluation_batches(4))
    assert [len(batch.labels) for batch in batches] == [4, 4, 1]
    images = np.concatenate([batch.images for batch in batches])
    for index, sample in enumerate(image_cache.samples):
        np.testing.assert_array_equal(images[index], image_cache.central_view(index, 14, 12))
        assert np.concatenate([batch.labels for batch in batches])[index] == sample.label


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes_share_an_evaluation_in_equally_many_batches(data: Path, size: int, ranks: int) -> None:
    image_cache = ImageCache(open_splits(data).val, {})
    tested = Loader(image_cache, RECIPE, workers=0)
    of_ranks = [list(tested.evaluation_batches(size, (rank, ranks))) for rank in range(ranks)]
    assert len({len(batches) for batches in of_ranks}) == 1
    found = [batch.images for batches in zip(*of_ranks, strict=True) for batch in batches]
    assert max(map(len, found)) <= size
    expected = [image_cache.central_view(index, 14, 12) for index in range(len(image_cache))]
    np.testing.assert_array_equal(np.concatenate(found), expected)


# Unreadable images


@pytest.fixture
def broken(tmp_path: Path) -> tuple[ImageCache, ImageCache]:
    """Return all images cached, and the same dataset with three files that became unreadable after it was opened."""
    root = make_dataset(tmp_path)
    whole, changed = open_splits(root).train, open_splits(root).train
    intact = ImageCache(whole, {})
    for index in range(len(intact)):
        intact.image(index)  # caches it
    (root / "train/dog/001.png").unlink()
    data = (root / "train/ox/002.png").read_bytes()
    (root / "train/ox/002.png").write_bytes(data[: len(data) // 2])  # another length
    data = (root / "train/big-cat/003.png").read_bytes()
    (root / "train/big-cat/003.png").write_bytes(data[:40] + bytes(len(data) - 40))  # the same length
    return intact, ImageCache(changed, {}, memory=0)


BROKEN = {"dog/001.png": "no longer exists", "ox/002.png": "when the dataset was opened", "big-cat/003.png": "damaged"}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_becomes_unreadable_is_named_and_substituted(
    broken: tuple[ImageCache, ImageCache], workers: int
) -> None:
    intact, changed = broken
    named = 0
    for step, batch in enumerate(Loader(changed, COLORFUL, axes=AXES, workers=workers).training_batches(0)):
        expected = build_batch(intact, COLORFUL, step, axes=AXES)
        assert batch.shift is not None
        assert expected.shift is not None
        unreadable = []
        for row, (epoch, place) in enumerate(view_keys_of_step(COLORFUL, step, len(intact))):
            index = place
            if (file := intact.samples[index].file) in BROKEN:
                unreadable.append(file)
                random = random_stream(COLORFUL.seed, SUBSTITUTE, epoch, place)
                drawn = [int(other) for other in random.integers(len(intact), size=MAX_SUBSTITUTES)]
                index = next(other for other in drawn if intact.samples[other].file not in BROKEN)
            view = training_view(intact.image(index), COLORFUL, epoch, index)
            np.testing.assert_array_equal(batch.images[row], view)
            np.testing.assert_array_equal(batch.shift[row], color_shift(COLORFUL, AXES, epoch, index))
            assert batch.labels[row] == intact.samples[index].label
        assert [file for file, _ in batch.unreadable] == unreadable
        assert all(BROKEN[file] in reason for file, reason in batch.unreadable)
        named += len(unreadable)
    assert named >= 6  # 12 steps of 5 are almost three epochs


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_has_disappeared_stops_training_with_advice(tmp_path: Path, workers: int) -> None:
    root = make_dataset(tmp_path)
    image_cache = ImageCache(open_splits(root).train, {}, memory=0)
    shutil.rmtree(root / "train")
    with pytest.raises(
        DatasetError,
        match=rf"and {MAX_SUBSTITUTES} other images were readable .* none of them is now \(.*no longer exists",
    ):
        next(Loader(image_cache, RECIPE, workers=workers).training_batches(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_skips_and_names_unreadable_images(tmp_path: Path, workers: int) -> None:
    root = make_dataset(tmp_path)
    image_cache = ImageCache(open_splits(root).val, {}, memory=0)
    (root / "val/dog/001.png").unlink()
    batches = list(Loader(image_cache, RECIPE, workers=workers).evaluation_batches(4))
    assert [len(batch.images) for batch in batches] == [4, 3, 1]
    assert [len(batch.labels) for batch in batches] == [4, 3, 1]
    assert [file for batch in batches for file, _ in batch.unreadable] == ["dog/001.png"]
    left = [index for index, sample in enumerate(image_cache.samples) if sample.file != "dog/001.png"]
    np.testing.assert_array_equal(
        np.concatenate([batch.images for batch in batches]),
        [image_cache.central_view(index, 14, 12) for index in left],
    )


# Worker processes


def doubled(item: int) -> tuple[np.ndarray, int]:
    return np.full(3, item, np.uint8), 2 * item


@pytest.mark.parametrize("free", [None, 10])  # 10 bytes of shared memory do not suffice: through pipes
def test_results_come_in_the_order_of_the_items(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    if free is not None:
        monkeypatch.setattr(worker_processes, "free_shared_memory", lambda: free)
    found = list(map_in_processes(doubled, range(30), 3, 3))
    assert [rest for _, rest in found] == [2 * item for item in range(30)]
    for item, (array, _) in enumerate(found):
        np.testing.assert_array_equal(array, [item] * 3)
        assert array.flags.writeable


@pytest.mark.parametrize(("local_processes", "shared"), [(1, True), (2, True), (3, False)])
def test_the_processes_of_a_run_divide_the_shared_memory_of_their_machine(
    data: Path, monkeypatch: pytest.MonkeyPatch, local_processes: int, shared: bool
) -> None:
    enough = (
        (worker_processes.PREFETCH_FACTOR + 2) * 3 * RECIPE.batch * RECIPE.crop**2
    )  # for one process with one worker
    monkeypatch.setattr(worker_processes, "free_shared_memory", lambda: 2 * enough)
    splits = open_splits(data)
    train, val = ImageCache(splits.train, {}, memory=0), ImageCache(splits.val, {}, memory=0)
    for batch in (
        next(Loader(train, RECIPE, workers=1, local_processes=local_processes).training_batches(0)),
        next(Loader(val, RECIPE, workers=1, local_processes=local_processes).evaluation_batches(RECIPE.batch)),
    ):
        assert isinstance(batch.images.base, torch.Tensor) is shared  # otherwise it came through a pipe


@pytest.mark.parametrize(
    ("workers", "local_processes", "cores", "expected"),
    [(None, 1, 8, 7), (None, 2, 8, 3), (None, 9, 8, 1), (5, 2, 8, 5), (None, 1, 128, 16), (None, 8, 128, 15)],
)
def test_the_processes_of_a_run_divide_the_cores_of_their_machine_by_default(
    data: Path, monkeypatch: pytest.MonkeyPatch, workers: int | None, local_processes: int, cores: int, expected: int
) -> None:
    started: list[int] = []

    def noting(_function: Any, _items: Any, count: int, *_others: Any, **_options: Any) -> Any:
        started.append(count)
        return iter(())

    monkeypatch.setattr("prelunet.training.data.image_cache.cores", lambda: cores)
    monkeypatch.setattr(loader, "map_in_processes", noting)
    image_cache = ImageCache(open_splits(data).train, {}, memory=0)
    tested = Loader(image_cache, RECIPE, workers=workers, local_processes=local_processes)
    assert list(tested.training_batches(0)) == []
    assert list(tested.evaluation_batches(4)) == []
    assert started == [expected] * 2


def test_items_are_requested_ahead_but_not_all_at_once() -> None:
    asked: list[int] = []

    def items() -> Any:
        for item in range(1000):
            asked.append(item)
            yield item

    results = map_in_processes(doubled, items(), 2, 3)
    assert [next(results)[1] for _ in range(3)] == [0, 2, 4]
    assert len(asked) <= 3 + 2 * worker_processes.PREFETCH_FACTOR + 1


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (lambda: OutOfMemory("too little"), OutOfMemory("too little")),
        (lambda: OSError(5, "Input/output error", "a/b.jpg"), EnvironmentFault("a/b.jpg: the device failed to read")),
    ],
)
def test_an_error_in_a_worker_is_raised_unchanged(raised: Callable[[], Exception], expected: Exception) -> None:
    def fail(item: int) -> tuple[np.ndarray, int]:
        raise raised()

    with pytest.raises(type(expected)) as caught:
        next(map_in_processes(fail, range(3), 1, 3))
    assert str(caught.value).startswith(str(expected))
    assert "Traceback" not in str(caught.value)


def test_a_worker_that_dies_is_reported_with_advice() -> None:
    def die(item: int) -> tuple[np.ndarray, int]:
        os.kill(os.getpid(), signal.SIGKILL)
        return doubled(item)

    with pytest.raises(EnvironmentFault, match=r"one of 1 image decoding processes has died.*--workers.*--shm-size"):
        next(map_in_processes(die, range(3), 1, 3))


def test_workers_ignore_the_signals_that_stop_training() -> None:
    def ask(item: int) -> tuple[np.ndarray, int]:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        return doubled(item)

    handler = signal.getsignal(signal.SIGCHLD)
    assert [rest for _, rest in map_in_processes(ask, range(4), 2, 3)] == [0, 2, 4, 6]
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_workers_exit_when_their_consumer_stops_early() -> None:
    def whose(item: int) -> tuple[np.ndarray, int]:
        return np.zeros(3, np.uint8), os.getpid()

    results = map_in_processes(whose, range(100), 2, 3)
    workers = {next(results)[1] for _ in range(2)}
    del results
    assert len(workers) == 2
    assert all_gone(workers, seconds=10)


def more_than_a_pipe_holds(item: int) -> tuple[np.ndarray, int]:
    return np.zeros(1_000_000, np.uint8), os.getpid()


def read_and_wait(connection: Connection) -> None:
    worker_processes.free_shared_memory = lambda: 0  # through pipes, where a worker blocks until it is read
    results = map_in_processes(more_than_a_pipe_holds, range(100), 2, 1_000_000)
    connection.send({next(results)[1] for _ in range(2)})
    signal.pause()


def test_workers_exit_when_their_consumer_is_killed() -> None:
    context = multiprocessing.get_context("fork")  # a new program would import torch first
    mine, theirs = context.Pipe()
    reader = context.Process(target=read_and_wait, args=(theirs,))
    reader.start()
    workers = mine.recv()
    assert len(workers) == 2
    reader.kill()
    reader.join()
    assert all_gone(workers, seconds=20)


FOREVER = 60  # seconds for which a worker is blocked; longer than any timeout below


def read_the_first() -> tuple[Any, set[int]]:
    """Return an iterator and its two workers, which are blocked after the first item."""
    stuck = multiprocessing.get_context("fork").SimpleQueue()

    def function(item: int) -> tuple[np.ndarray, int]:
        if item:
            stuck.put(os.getpid())
            time.sleep(FOREVER)
        return doubled(item)

    results = map_in_processes(function, range(9), 2, 3)
    assert next(results)[1] == 0
    return results, {stuck.get() for _ in range(2)}


def test_blocked_workers_exit_within_seconds_when_their_consumer_stops_early() -> None:
    results, workers = read_the_first()
    begun = time.monotonic()
    results.close()
    assert all_gone(workers, seconds=15)
    assert time.monotonic() - begun < 15


LEAVE = """
import sys
sys.path.insert(0, {tests!r})
from tests.training.data.test_loading import read_the_first
results, workers = read_the_first()  # never closed
print(*workers, flush=True)
"""


def test_a_program_exits_within_seconds_even_if_its_workers_are_blocked() -> None:
    script = LEAVE.format(tests=str(Path(__file__).parents[3]))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        workers = {int(word) for word in program.stdout.readline().split()}
        assert len(workers) == 2
        try:
            assert program.wait(20) == 0
        finally:
            program.kill()  # otherwise a failure would wait for it
    assert all_gone(workers, seconds=0)


def all_gone(workers: set[int], seconds: float) -> bool:
    """Return whether all these processes exit within this time."""
    end = time.monotonic() + seconds
    while any(map(runs, workers)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
