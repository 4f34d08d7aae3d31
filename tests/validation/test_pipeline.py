"""The concurrent pipeline gives the same scores in the same order as a sequential one, with bounded memory."""

import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.classify import Classification, ViewResult, average_image
from prelunet.evaluator.engine.scores import nine_windows
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.errors import ImageError
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.imaging.views import ViewImage, make_views
from prelunet.evaluator.protocols import EvaluationProtocol, build_protocol
from prelunet.evaluator.validation.pipeline import evaluate_chunks
from prelunet.evaluator.validation.predictions import Prediction, build_prediction
from prelunet.evaluator.validation.timing import StageTimer
from tests.helpers.fakes import FakeSession, fake_contract
from tests.validation.shared_data import (
    BAD,
    CENTER,
    CLASSES,
    IMAGES,
    SHARED_CANVASES,
    TWO_SCALES,
    WAIT,
    IrregularSession,
    RecordingReader,
    chunks_of,
    no_thread_is_left,
    write_dataset,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_dataset(tmp_path_factory.mktemp("data") / "val")


_no_thread_is_left = pytest.fixture(autouse=True)(no_thread_is_left)


def seen_alone(session: FakeSession, image: np.ndarray, protocol: EvaluationProtocol) -> Classification:
    """Classify an image view by view, without shared batches or packing."""
    results = []
    for view in make_views(image, protocol):
        height, width = view.image.shape[:2]
        outputs = session.run(np.array(view.image)[None], np.array([[height, width]]))
        rows, columns = outputs.windows[0].tolist()
        scores, logits = outputs.scores[0], outputs.logits[0]
        if view.view.part == "nine":
            (rows, columns), scores, logits = nine_windows(outputs.window_scores[0])
        results.append(ViewResult(view.view, height, width, view.capped, (rows, columns), scores, logits))
    return average_image(protocol, results)


def one_after_the_other(
    session: FakeSession, dataset: Dataset, protocol: EvaluationProtocol, chunk: Sequence[Sample]
) -> tuple[list[Prediction], np.ndarray]:
    """Evaluate a chunk without threads or batches."""
    lines, rows = [], []
    for sample in chunk:
        try:
            result = seen_alone(session, decode_rgb(dataset.read(sample)), protocol)
        except ImageError as error:
            lines.append(Prediction(sample.file, sample.label, refused=str(error)))
            rows.append(np.full(len(CLASSES), np.nan, np.float32))
        else:
            lines.append(build_prediction(sample.file, sample.label, result))
            rows.append(result.scores)
    return lines, np.stack(rows)


@pytest.mark.parametrize(("chunk", "portion"), [(64, 64), (20, 7), (9, 1), (16, 16), (10, 3)])
@pytest.mark.parametrize(("sessions", "threads"), [(1, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("rules", [BatchRules(), SHARED_CANVASES], ids=["exact", "shared"])
def test_lines_and_scores_are_those_of_one_image_after_the_other(
    dataset: Dataset, chunk: int, portion: int, sessions: int, threads: int, rules: BatchRules
) -> None:
    chunks = chunks_of(dataset.samples, chunk)
    fakes = [IrregularSession(rules=rules) for _ in range(sessions)]
    found = list(evaluate_chunks(fakes, dataset, TWO_SCALES, chunks, portion, threads))
    assert len(found) == len(chunks)
    for samples, (lines, scores) in zip(chunks, found, strict=True):
        expected, rows = one_after_the_other(FakeSession(), dataset, TWO_SCALES, samples)
        assert lines == expected
        np.testing.assert_array_equal(scores, rows)


@pytest.mark.parametrize("name", ["spp-18", "ten-crop", "center"])
def test_the_same_holds_for_crops_and_for_nine_windows(dataset: Dataset, name: str) -> None:
    protocol = build_protocol(name, fake_contract())
    chunk = dataset.samples[:20]
    ((lines, scores),) = evaluate_chunks([FakeSession(), FakeSession()], dataset, protocol, [chunk], 6, 2)
    expected, rows = one_after_the_other(FakeSession(), dataset, protocol, chunk)
    assert lines == expected
    np.testing.assert_array_equal(scores, rows)


def test_blank_rows_are_computed_and_belong_to_no_image(dataset: Dataset) -> None:
    """Without blank rows, the tests above would not cover shared canvases."""
    timer, fake = StageTimer(), FakeSession(rules=SHARED_CANVASES)
    ((lines, _),) = evaluate_chunks([fake], dataset, TWO_SCALES, [dataset.samples], 20, 2, timer=timer)
    rows = sum(shape[0] for shape in fake.calls)
    assert rows > timer.totals().views == len(TWO_SCALES.views) * (IMAGES - len(BAD))
    assert len(lines) == IMAGES


def test_no_image_is_read_twice_for_several_scales(dataset: Dataset) -> None:
    reading = RecordingReader(dataset)
    fakes = [FakeSession(), FakeSession()]
    list(evaluate_chunks(fakes, replace(dataset, reader=reading), TWO_SCALES, chunks_of(dataset.samples, 20), 7, 3))
    assert sorted(reading.seen) == [sample.file for sample in dataset.samples]


# Memory


def test_no_image_is_copied_whole_into_an_array(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow resizes its own image: a copy as an array would take half the memory of a large photo again."""
    given: list[bool] = []
    made = make_views

    def noting(image: Any, protocol: EvaluationProtocol) -> list[ViewImage]:
        given.append(isinstance(image, Image.Image))
        return made(image, protocol)

    monkeypatch.setattr("prelunet.evaluator.validation.pipeline.make_views", noting)
    list(evaluate_chunks([FakeSession()], dataset, TWO_SCALES, [dataset.samples], 20, 2))
    assert given == [True] * (IMAGES - len(BAD))


@pytest.mark.parametrize("sessions", [1, 2])
def test_two_portions_of_pixels_for_each_session_are_in_memory_and_no_more(
    dataset: Dataset, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Slow(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            time.sleep(0.02)  # time for the threads to prepare as much as they may
            return super().compute(staged)

    def making(image: np.ndarray, protocol: EvaluationProtocol) -> list[ViewImage]:
        alive.append(sum(reference() is not None for reference in made))
        views = make_views(image, protocol)
        made.append(weakref.ref(views[0].image))
        return views

    monkeypatch.setattr("prelunet.evaluator.validation.pipeline.make_views", making)
    good = [sample for index, sample in enumerate(dataset.samples) if index not in BAD]
    list(evaluate_chunks([Slow() for _ in range(sessions)], dataset, TWO_SCALES, [good], 6, 1))
    assert len(made) == len(good)
    # of the last image's portion five are counted; a thread may have dropped its own references a moment later
    assert 6 * (2 * sessions - 1) < max(alive) <= 2 * sessions * 6


@pytest.mark.parametrize("sessions", [1, 2])
def test_three_portions_per_session_are_started_before_the_first_is_written(dataset: Dataset, sessions: int) -> None:
    reading = RecordingReader(dataset)
    read_ahead = replace(dataset, reader=reading)
    chunks = chunks_of(dataset.samples, 4)
    ahead = []
    for number, _ in enumerate(
        evaluate_chunks([FakeSession() for _ in range(sessions)], read_ahead, CENTER, chunks, 4, 2)
    ):
        time.sleep(0.03)  # simulates writing, and gives the threads time to run ahead
        ahead.append(len(reading.seen) - 4 * number)
    assert max(ahead) == 3 * sessions * 4


def test_two_batches_are_ready_while_one_is_computed_and_no_more(dataset: Dataset) -> None:
    class Watching(FakeSession):
        staged = finished = most = 0

        def stage(self, images: np.ndarray, sizes: np.ndarray) -> Any:
            self.staged += 1
            self.most = max(self.most, self.staged - self.finished)
            return super().stage(images, sizes)

        def compute(self, staged: Any) -> Outputs:
            time.sleep(0.005)
            outputs = super().compute(staged)
            self.finished += 1
            return outputs

    session = Watching()
    list(evaluate_chunks([session], dataset, TWO_SCALES, [dataset.samples], 7, 2))
    assert session.staged == session.finished > 20
    assert session.most == 2 + 1


# Concurrency


def test_a_portion_is_decoded_while_the_one_before_is_computed_and_the_one_before_that_is_written(
    dataset: Dataset,
) -> None:
    portions = chunks_of([sample for index, sample in enumerate(dataset.samples) if index not in BAD], 6)
    reading = RecordingReader(dataset)
    computed = count()
    session_has = [threading.Event() for _ in portions]

    def decoded(portion: int) -> None:
        deadline = time.monotonic() + WAIT
        while portion < len(portions) and len(set(reading.seen) & {sample.file for sample in portions[portion]}) < len(
            portions[portion]
        ):
            assert time.monotonic() < deadline, f"portion {portion} is not decoded meanwhile"
            time.sleep(0.001)

    class Waiting(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            portion = next(computed)  # crops of one size: a portion is one batch
            session_has[portion].set()
            decoded(portion + 1)
            return super().compute(staged)

    session = Waiting()
    results = evaluate_chunks([session], replace(dataset, reader=reading), CENTER, portions, 6, 2)
    for number, _ in enumerate(results):
        for later in session_has[number + 1 : number + 2]:
            assert later.wait(WAIT), "the next portion is not computed while this one is written"
        decoded(number + 2)
    assert len(session.calls) == len(portions)


def test_each_session_is_computed_on_by_one_thread_of_its_own(dataset: Dataset) -> None:
    class Recording(IrregularSession):
        def __init__(self) -> None:
            super().__init__()
            self.threads: dict[str, set[threading.Thread]] = {"stage": set(), "compute": set()}

        def stage(self, images: np.ndarray, sizes: np.ndarray) -> Any:
            self.threads["stage"].add(threading.current_thread())
            return super().stage(images, sizes)

        def compute(self, staged: Any) -> Outputs:
            self.threads["compute"].add(threading.current_thread())
            return super().compute(staged)

    sessions = [Recording(), Recording()]
    list(evaluate_chunks(sessions, dataset, TWO_SCALES, [dataset.samples], 5, 2))
    threads = [thread for session in sessions for kind in session.threads.values() for thread in kind]
    assert len(set(threads)) == len(threads) == 4
    assert threading.main_thread() not in threads


def test_a_portion_does_not_wait_for_a_busy_session_while_another_is_free(dataset: Dataset) -> None:
    gate = threading.Event()

    class Busy(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            assert gate.wait(WAIT)
            return super().compute(staged)

    busy, free = Busy(), FakeSession()
    portions = chunks_of(dataset.samples, 1)
    timer = threading.Timer(0.3, gate.set)
    timer.start()
    found = list(evaluate_chunks([busy, free], dataset, CENTER, portions, 1, 2))
    timer.join()
    assert [line.file for lines, _ in found for line in lines] == [sample.file for sample in dataset.samples]
    assert len(free.calls) > 0
    assert len(busy.calls) + len(free.calls) == IMAGES - len(BAD)
