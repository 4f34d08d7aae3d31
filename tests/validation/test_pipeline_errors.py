"""Errors anywhere in the pipeline reach the caller in order, and no threads remain."""

import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.errors import ContractError, DatasetError, UsageError
from prelunet.evaluator.validation.pipeline import evaluate_chunks
from prelunet.evaluator.validation.timing import Stage, StageTimer
from tests.helpers.fakes import FakeSession, fake_contract
from tests.validation.shared_data import (
    CENTER,
    TWO_SCALES,
    WAIT,
    IrregularSession,
    RecordingReader,
    chunks_of,
    count_until_error,
    no_thread_is_left,
    write_dataset,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_dataset(tmp_path_factory.mktemp("data") / "val")


_no_thread_is_left = pytest.fixture(autouse=True)(no_thread_is_left)


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_read_error_comes_after_the_portions_before_it(dataset: Dataset, sessions: int) -> None:
    def vanished(file: str) -> None:
        if file.endswith("022.png"):
            raise DatasetError("planted: the disk is gone")

    broken = replace(dataset, reader=RecordingReader(dataset, vanished))
    fakes = [IrregularSession() for _ in range(sessions)]
    results = evaluate_chunks(fakes, broken, TWO_SCALES, chunks_of(dataset.samples, 5), 5, 2)
    assert count_until_error(results, DatasetError, "planted") == 4


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt("planted"), MemoryError("planted")])
@pytest.mark.parametrize("where", ["stage", "compute"])
def test_an_error_of_the_session_comes_after_the_portions_before_it(
    dataset: Dataset, where: str, error: BaseException
) -> None:
    session = FakeSession()
    calls, working = count(1), getattr(session, where)

    def failing(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise error
        return working(*arguments)

    setattr(session, where, failing)
    results = evaluate_chunks([session], dataset, CENTER, chunks_of(dataset.samples, 8), 8, 2)
    assert count_until_error(results, type(error), "planted") == 2


def test_a_view_that_the_session_refuses_is_an_error_and_not_a_hang(dataset: Dataset) -> None:
    session = FakeSession(fake_contract(max_side=60, default_scales=(28,)))
    results = evaluate_chunks([session], dataset, TWO_SCALES, [dataset.samples], 8, 2)
    assert count_until_error(results, UsageError, "larger than this model's 60 pixels") == 0


def test_of_several_errors_the_first_in_the_order_of_the_images_is_raised(dataset: Dataset) -> None:
    later = threading.Event()

    def failing(file: str) -> None:
        if file.endswith("009.png"):
            later.set()
            raise DatasetError("planted: the later image")
        if file.endswith("004.png"):
            later.wait(WAIT)
            time.sleep(0.02)
            raise DatasetError("planted: the earlier image")

    broken = replace(dataset, reader=RecordingReader(dataset, failing))
    results = evaluate_chunks([FakeSession(), FakeSession()], broken, CENTER, chunks_of(dataset.samples, 3), 3, 3)
    assert count_until_error(results, DatasetError, "earlier") == 1


def test_after_an_error_only_the_portions_before_it_are_computed(dataset: Dataset) -> None:
    gate = threading.Event()

    def failing(file: str) -> None:
        if file.endswith("003.png"):  # of the second portion
            threading.Timer(1.5, gate.set).start()  # seconds until the error has arrived, on busy machines too
            raise DatasetError("planted")

    class Gated(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            assert gate.wait(WAIT)
            return super().compute(staged)

    sessions = [Gated(), Gated()]
    broken = replace(dataset, reader=RecordingReader(dataset, failing))
    results = evaluate_chunks(sessions, broken, CENTER, chunks_of(dataset.samples, 3), 3, 1)
    assert count_until_error(results, DatasetError, "planted") == 1
    assert len(sessions[0].calls) + len(sessions[1].calls) == 1


def test_nan_scores_are_an_error_that_names_the_image(dataset: Dataset) -> None:
    class Broken(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            outputs = super().compute(staged)
            if len(self.calls) == 2:
                outputs.scores[-1] = np.nan
            return outputs

    results = evaluate_chunks([Broken()], dataset, CENTER, chunks_of(dataset.samples, 8), 8, 2)
    assert count_until_error(results, ContractError, r"015\.png: .*not finite") == 1


def test_a_session_whose_slots_are_all_taken_still_ends(dataset: Dataset) -> None:
    """Like a GPU session, whose `stage` waits until a batch is computed or dropped; this one has two slots."""
    slots, stuck = threading.Semaphore(2), threading.Event()

    class Staged:
        def __init__(self, arrays: Any) -> None:
            self.arrays = arrays
            self.free = weakref.finalize(self, slots.release)

    class Narrow(FakeSession):
        def stage(self, images: np.ndarray, sizes: np.ndarray) -> Any:
            if not slots.acquire(timeout=WAIT):
                stuck.set()
            return Staged(super().stage(images, sizes))

        def compute(self, staged: Any) -> Outputs:
            outputs = super().compute(staged.arrays)
            staged.free()
            time.sleep(0.005)  # time for the other thread to fill all slots
            return outputs

    for taken in range(4):
        results = evaluate_chunks([Narrow()], dataset, TWO_SCALES, chunks_of(dataset.samples, 10), 10, 2)
        for _ in range(taken):
            next(results)
        results.close()
    assert len(list(evaluate_chunks([Narrow()], dataset, TWO_SCALES, chunks_of(dataset.samples, 30), 10, 2))) == 2
    assert not stuck.is_set()


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_closed_generator_computes_no_more(dataset: Dataset, taken: int) -> None:
    session = FakeSession()
    results = evaluate_chunks([session], dataset, TWO_SCALES, chunks_of(dataset.samples, 5), 5, 2)
    for _ in range(taken):
        next(results)
    results.close()
    calls = len(session.calls)
    time.sleep(0.02)
    assert len(session.calls) == calls
    assert taken or not calls


def test_ctrl_c_ends_everything_while_the_session_and_the_threads_are_busy(dataset: Dataset) -> None:
    busy = threading.Event()

    class Busy(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            busy.set()
            time.sleep(0.1)
            return super().compute(staged)

    def interrupting() -> None:
        assert busy.wait(WAIT)
        os.kill(os.getpid(), signal.SIGINT)

    session = Busy()
    another = threading.Thread(target=interrupting)
    another.start()
    with pytest.raises(KeyboardInterrupt):
        list(evaluate_chunks([session], dataset, TWO_SCALES, [dataset.samples], 10, 2))
    another.join()
    assert len(session.calls) == 1


def test_a_consumer_that_fails_leaves_no_thread(dataset: Dataset) -> None:
    with suppress(ZeroDivisionError):
        for _ in evaluate_chunks([FakeSession()], dataset, CENTER, chunks_of(dataset.samples, 5), 5, 2):
            raise ZeroDivisionError


def test_no_chunks_give_no_results(dataset: Dataset) -> None:
    assert list(evaluate_chunks([FakeSession()], dataset, CENTER, [], 5, 2)) == []


@pytest.mark.parametrize("sessions", [1, 2])
@pytest.mark.parametrize("image", [0, 12, 31])
def test_a_thread_that_cannot_be_started_is_an_error_and_not_a_hang(
    dataset: Dataset, sessions: int, image: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller submits images of the first portions to the pool; the packing threads submit later ones."""
    submit, handed = ThreadPoolExecutor.submit, count()

    def failing(pool: ThreadPoolExecutor, *arguments: Any) -> Any:
        if next(handed) == image:
            raise RuntimeError("can't start new thread")
        return submit(pool, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", failing)
    fakes = [FakeSession() for _ in range(sessions)]
    results = evaluate_chunks(fakes, dataset, CENTER, chunks_of(dataset.samples, 5), 5, 2)
    assert count_until_error(results, RuntimeError, "new thread") == image // 5


def test_a_thread_that_fails_between_two_batches_is_an_error_and_not_a_hang(dataset: Dataset) -> None:
    class FailingTimer(StageTimer):
        waits = 0

        def add(self, stage: Stage, seconds: float) -> None:
            self.waits += stage == "wait"
            if self.waits == 3:
                raise MemoryError("planted")
            super().add(stage, seconds)

    chunks = chunks_of(dataset.samples, 5)
    results = evaluate_chunks([FakeSession()], dataset, CENTER, chunks, 5, 2, timer=FailingTimer())
    assert count_until_error(results, MemoryError, "planted") <= 2
