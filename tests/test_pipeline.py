"""Everything at the same time, and yet: the same scores in the same order, bounded memory, and nothing left behind."""

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from PIL import Image

from evaluator.datasets.opening import open_dataset
from evaluator.datasets.sample import Dataset, Sample
from evaluator.engine.batching import BatchRules
from evaluator.engine.classify import Classified, ViewResult, classify_images, combine
from evaluator.engine.scores import nine_windows
from evaluator.engine.session import Outputs
from evaluator.engine.stages import STAGES, Stages
from evaluator.errors import ContractError, DatasetError, ImageError, UsageError
from evaluator.imaging.decode import decode_rgb
from evaluator.imaging.views import ViewImage, make_views
from evaluator.protocols import Protocol, make_protocol
from evaluator.validation.pipeline import ChunkResult, evaluate_chunks
from evaluator.validation.predictions import Prediction, prediction_of
from fakes import FakeSession, fake_contract

CLASSES = [entry.wnid for entry in fake_contract().classes]
CENTER = make_protocol("center", fake_contract())
TWO_SCALES = make_protocol("dense-29-36", fake_contract())
IMAGES, BAD = 53, (7, 30, 31, 32, 52)  # damaged: in parts of one to three images whole parts are
WAIT = 20.0  # seconds, after which a test that waits for another thread has failed


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Lay out 53 images of 12 sizes; five are damaged."""
    folder = tmp_path_factory.mktemp("data") / "val"
    rng = np.random.default_rng(5)
    for index in range(IMAGES):
        path = folder / CLASSES[(0, 2, 3, 5)[index * 4 // IMAGES]] / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = (29 + index % 4 * 9, 30 + index % 3 * 13)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(path)
        if index in BAD:
            path.write_bytes(b"no image")
    return open_dataset(folder, split="val", class_names=CLASSES)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


class Reading:
    """Reads for a dataset; `seen` gets the name of each file, and `before` is called with it."""

    def __init__(self, dataset: Dataset, before: Callable[[str], None] = lambda _file: None) -> None:
        self.seen: list[str] = []
        self._reader, self._before = dataset.reader, before

    def read(self, file: str) -> bytes:
        self.seen.append(file)
        self._before(file)
        return self._reader.read(file)


def chunks_of(samples: Sequence[Sample], size: int) -> list[Sequence[Sample]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def seen_alone(session: FakeSession, image: np.ndarray, protocol: Protocol) -> Classified:
    """Classify an image view by view: nothing shares a batch, nothing is packed."""
    results = []
    for view in make_views(image, protocol):
        height, width = view.image.shape[:2]
        outputs = session.run(np.array(view.image)[None], np.array([[height, width]]))
        rows, columns = outputs.windows[0].tolist()
        scores, logits = outputs.scores[0], outputs.logits[0]
        if view.view.part == "nine":
            (rows, columns), scores, logits = nine_windows(outputs.window_scores[0])
        results.append(ViewResult(view.view, height, width, view.capped, (rows, columns), scores, logits))
    return combine(protocol, results)


def one_after_the_other(
    session: FakeSession, dataset: Dataset, protocol: Protocol, chunk: Sequence[Sample]
) -> tuple[list[Prediction], np.ndarray]:
    """Evaluate a chunk without any thread or batch."""
    lines, rows = [], []
    for sample in chunk:
        try:
            result = seen_alone(session, decode_rgb(dataset.read(sample)), protocol)
        except ImageError as error:
            lines.append(Prediction(sample.file, sample.label, refused=str(error)))
            rows.append(np.full(len(CLASSES), np.nan, np.float32))
        else:
            lines.append(prediction_of(sample.file, sample.label, result))
            rows.append(result.scores)
    return lines, np.stack(rows)


class Irregular(FakeSession):
    """Takes a while, never the same."""

    def compute(self, staged: Any) -> Outputs:
        time.sleep(0.004 * (hash((len(self.calls), id(self))) % 3))
        return super().compute(staged)


SHARED_CANVASES = BatchRules(canvas_step=16, max_windows=5000, max_pixels=15_000, switch_pixels=20_000)


@pytest.mark.parametrize(("chunk", "part"), [(64, 64), (20, 7), (9, 1), (16, 16), (10, 3)])
@pytest.mark.parametrize(("sessions", "threads"), [(1, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("rules", [BatchRules(), SHARED_CANVASES], ids=["exact", "shared"])
def test_lines_and_scores_are_those_of_one_image_after_the_other(
    dataset: Dataset, chunk: int, part: int, sessions: int, threads: int, rules: BatchRules
) -> None:
    chunks = chunks_of(dataset.samples, chunk)
    fakes = [Irregular(rules=rules) for _ in range(sessions)]
    found = list(evaluate_chunks(fakes, dataset, TWO_SCALES, chunks, part, threads))
    assert len(found) == len(chunks)
    for samples, (lines, scores) in zip(chunks, found, strict=True):
        expected, rows = one_after_the_other(FakeSession(), dataset, TWO_SCALES, samples)
        assert lines == expected
        np.testing.assert_array_equal(scores, rows)


@pytest.mark.parametrize("name", ["spp-18", "ten-crop", "center"])
def test_the_same_holds_for_crops_and_for_nine_windows(dataset: Dataset, name: str) -> None:
    protocol = make_protocol(name, fake_contract())
    chunk = dataset.samples[:20]
    ((lines, scores),) = evaluate_chunks([FakeSession(), FakeSession()], dataset, protocol, [chunk], 6, 2)
    expected, rows = one_after_the_other(FakeSession(), dataset, protocol, chunk)
    assert lines == expected
    np.testing.assert_array_equal(scores, rows)


def test_scores_are_those_of_classify_images(dataset: Dataset) -> None:
    good = [sample for index, sample in enumerate(dataset.samples) if index not in BAD][:12]
    ((_, scores),) = evaluate_chunks([FakeSession()], dataset, TWO_SCALES, [good], 5, 2)
    images = [decode_rgb(dataset.read(sample)) for sample in good]
    together = classify_images(FakeSession(), images, TWO_SCALES)
    np.testing.assert_array_equal(scores, [result.scores for result in together])


def test_blank_rows_are_computed_and_belong_to_no_image(dataset: Dataset) -> None:
    """The test above would say little of shared canvases if there were no blank rows."""
    stages, fake = Stages(), FakeSession(rules=SHARED_CANVASES)
    ((lines, _),) = evaluate_chunks([fake], dataset, TWO_SCALES, [dataset.samples], 20, 2, stages=stages)
    rows = sum(shape[0] for shape in fake.calls)
    assert rows > stages.tally().views == len(TWO_SCALES.views) * (IMAGES - len(BAD))
    assert len(lines) == IMAGES


def test_no_image_is_read_twice_for_several_scales(dataset: Dataset) -> None:
    reading = Reading(dataset)
    fakes = [FakeSession(), FakeSession()]
    list(evaluate_chunks(fakes, replace(dataset, reader=reading), TWO_SCALES, chunks_of(dataset.samples, 20), 7, 3))
    assert sorted(reading.seen) == [sample.file for sample in dataset.samples]


# Memory


@pytest.mark.parametrize("sessions", [1, 2])
def test_two_parts_of_pixels_for_each_session_are_in_memory_and_no_more(
    dataset: Dataset, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Slow(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            time.sleep(0.02)  # room for the threads to prepare all that they may
            return super().compute(staged)

    def making(image: np.ndarray, protocol: Protocol) -> list[ViewImage]:
        alive.append(sum(reference() is not None for reference in made))
        views = make_views(image, protocol)
        made.append(weakref.ref(views[0].image))
        return views

    monkeypatch.setattr("evaluator.validation.pipeline.make_views", making)
    good = [sample for index, sample in enumerate(dataset.samples) if index not in BAD]
    list(evaluate_chunks([Slow() for _ in range(sessions)], dataset, TWO_SCALES, [good], 6, 1))
    assert len(made) == len(good)
    # of the last image's part five are counted; a thread may have dropped its own references a moment later
    assert 6 * (2 * sessions - 1) < max(alive) <= 2 * sessions * 6


@pytest.mark.parametrize("sessions", [1, 2])
def test_three_parts_for_each_session_are_begun_before_the_first_of_them_is_written(
    dataset: Dataset, sessions: int
) -> None:
    reading = Reading(dataset)
    read_ahead = replace(dataset, reader=reading)
    chunks = chunks_of(dataset.samples, 4)
    ahead = []
    for number, _ in enumerate(
        evaluate_chunks([FakeSession() for _ in range(sessions)], read_ahead, CENTER, chunks, 4, 2)
    ):
        time.sleep(0.03)  # as if it was written: room for the threads to run ahead, if they did
        ahead.append(len(reading.seen) - 4 * number)
    assert max(ahead) == 3 * sessions * 4


def test_two_batches_are_ready_while_one_is_computed_and_no_more(dataset: Dataset) -> None:
    class Watching(FakeSession):
        staged = begun = 0
        most = 0

        def stage(self, images: np.ndarray, sizes: np.ndarray) -> Any:
            self.staged += 1
            self.most = max(self.most, self.staged - self.begun)
            return super().stage(images, sizes)

        def compute(self, staged: Any) -> Outputs:
            self.begun += 1
            time.sleep(0.005)
            return super().compute(staged)

    session = Watching()
    list(evaluate_chunks([session], dataset, TWO_SCALES, [dataset.samples], 7, 2))
    assert session.staged == session.begun > 20
    assert session.most == 2


# At the same time


def test_a_part_is_decoded_while_the_one_before_is_computed_and_the_one_before_that_is_written(
    dataset: Dataset,
) -> None:
    parts = chunks_of([sample for index, sample in enumerate(dataset.samples) if index not in BAD], 6)
    reading = Reading(dataset)
    computed = count()
    session_has = [threading.Event() for _ in parts]

    def decoded(part: int) -> None:
        deadline = time.monotonic() + WAIT
        while part < len(parts) and len(set(reading.seen) & {sample.file for sample in parts[part]}) < len(parts[part]):
            assert time.monotonic() < deadline, f"part {part} is not decoded meanwhile"
            time.sleep(0.001)

    class Waiting(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            part = next(computed)  # crops of one size: a part is one batch
            session_has[part].set()
            decoded(part + 1)
            return super().compute(staged)

    session = Waiting()
    results = evaluate_chunks([session], replace(dataset, reader=reading), CENTER, parts, 6, 2)
    for number, _ in enumerate(results):
        for later in session_has[number + 1 : number + 2]:
            assert later.wait(WAIT), "the next part is not computed while this one is written"
        decoded(number + 2)
    assert len(session.calls) == len(parts)


def test_each_session_is_computed_on_by_one_thread_of_its_own(dataset: Dataset) -> None:
    class Recording(Irregular):
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


def test_a_session_that_is_busy_gets_no_part_which_another_can_take(dataset: Dataset) -> None:
    gate = threading.Event()

    class Busy(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            assert gate.wait(WAIT)
            return super().compute(staged)

    busy, free = Busy(), FakeSession()
    parts = chunks_of(dataset.samples, 1)
    timer = threading.Timer(0.3, gate.set)
    timer.start()
    found = list(evaluate_chunks([busy, free], dataset, CENTER, parts, 1, 2))
    timer.join()
    assert [line.file for lines, _ in found for line in lines] == [sample.file for sample in dataset.samples]
    assert len(free.calls) > 0
    assert len(busy.calls) + len(free.calls) == IMAGES - len(BAD)


# Errors


def until_it_fails(results: Iterator[ChunkResult], error: type[BaseException], match: str) -> int:
    """Return how many chunks were given before the error."""
    given: list[ChunkResult] = []
    with pytest.raises(error, match=match):
        given.extend(results)
    return len(given)


@pytest.mark.parametrize("sessions", [1, 2])
def test_an_error_of_reading_comes_behind_the_parts_before_it(dataset: Dataset, sessions: int) -> None:
    def vanished(file: str) -> None:
        if file.endswith("022.png"):
            raise DatasetError("planted: the disk is gone")

    broken = replace(dataset, reader=Reading(dataset, vanished))
    fakes = [Irregular() for _ in range(sessions)]
    results = evaluate_chunks(fakes, broken, TWO_SCALES, chunks_of(dataset.samples, 5), 5, 2)
    assert until_it_fails(results, DatasetError, "planted") == 4


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt("planted"), MemoryError("planted")])
@pytest.mark.parametrize("where", ["stage", "compute"])
def test_an_error_of_the_session_comes_behind_the_parts_before_it(
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
    assert until_it_fails(results, type(error), "planted") == 2


def test_a_view_that_the_session_refuses_is_an_error_and_not_a_hang(dataset: Dataset) -> None:
    session = FakeSession(fake_contract(max_side=60, default_scales=(28,)))
    results = evaluate_chunks([session], dataset, TWO_SCALES, [dataset.samples], 8, 2)
    assert until_it_fails(results, UsageError, "larger than this model's 60 pixels") == 0


def test_the_first_of_several_errors_in_the_order_of_the_images_is_told(dataset: Dataset) -> None:
    later = threading.Event()

    def failing(file: str) -> None:
        if file.endswith("009.png"):
            later.set()
            raise DatasetError("planted: the later image")
        if file.endswith("004.png"):
            later.wait(WAIT)
            time.sleep(0.02)
            raise DatasetError("planted: the earlier image")

    broken = replace(dataset, reader=Reading(dataset, failing))
    results = evaluate_chunks([FakeSession(), FakeSession()], broken, CENTER, chunks_of(dataset.samples, 3), 3, 3)
    assert until_it_fails(results, DatasetError, "earlier") == 1


def test_nothing_behind_an_error_is_computed_any_more_while_the_parts_before_it_are(dataset: Dataset) -> None:
    gate = threading.Event()

    def failing(file: str) -> None:
        if file.endswith("003.png"):  # of the second part
            threading.Timer(0.2, gate.set).start()
            raise DatasetError("planted")

    class Gated(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            assert gate.wait(WAIT)
            return super().compute(staged)

    sessions = [Gated(), Gated()]
    broken = replace(dataset, reader=Reading(dataset, failing))
    results = evaluate_chunks(sessions, broken, CENTER, chunks_of(dataset.samples, 3), 3, 1)
    assert until_it_fails(results, DatasetError, "planted") == 1
    assert len(sessions[0].calls) + len(sessions[1].calls) == 1


def test_scores_that_are_no_numbers_name_the_file(dataset: Dataset) -> None:
    class Broken(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            outputs = super().compute(staged)
            if len(self.calls) == 2:
                outputs.scores[-1] = np.nan
            return outputs

    results = evaluate_chunks([Broken()], dataset, CENTER, chunks_of(dataset.samples, 8), 8, 2)
    assert until_it_fails(results, ContractError, r"015\.png: .*no numbers") == 1


def test_a_session_with_little_room_ends_too_when_all_of_it_is_taken(dataset: Dataset) -> None:
    """As a GPU, whose `stage` waits until a batch is computed or dropped; here there is room for two."""
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
            time.sleep(0.005)  # in which the other thread fills all room
            return outputs

    for taken in range(4):
        results = evaluate_chunks([Narrow()], dataset, TWO_SCALES, chunks_of(dataset.samples, 10), 10, 2)
        for _ in range(taken):
            next(results)
        results.close()
    assert len(list(evaluate_chunks([Narrow()], dataset, TWO_SCALES, chunks_of(dataset.samples, 30), 10, 2))) == 2
    assert not stuck.is_set()


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_generator_that_is_closed_computes_no_more(dataset: Dataset, taken: int) -> None:
    session = FakeSession()
    results = evaluate_chunks([session], dataset, TWO_SCALES, chunks_of(dataset.samples, 5), 5, 2)
    for _ in range(taken):
        next(results)
    results.close()
    calls = len(session.calls)
    time.sleep(0.02)
    assert len(session.calls) == calls
    assert taken or not calls


def test_ctrl_c_ends_everything_though_the_session_and_the_threads_are_busy(dataset: Dataset) -> None:
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


def test_no_chunks_are_no_work(dataset: Dataset) -> None:
    assert list(evaluate_chunks([FakeSession()], dataset, CENTER, [], 5, 2)) == []


# Where the time goes


def test_stages_and_counts_tell_what_was_done(dataset: Dataset) -> None:
    class Slow(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            time.sleep(0.01)
            return super().compute(staged)

    session, stages = Slow(rules=SHARED_CANVASES), Stages()
    list(evaluate_chunks([session], dataset, TWO_SCALES, [dataset.samples], 20, 2, stages=stages))
    tally = stages.tally()
    assert (tally.images, tally.views) == (IMAGES, len(TWO_SCALES.views) * (IMAGES - len(BAD)))
    assert tally.batches == len(session.calls) == sum(stages.canvases().values())
    assert set(stages.canvases()) == {shape[:3] for shape in session.calls}
    assert tally.changes == 1 + sum(a != b for a, b in zip(session.calls, session.calls[1:], strict=False))
    assert tally.canvas_pixels == sum(rows * height * width for rows, height, width, _ in session.calls)
    pixels = 0
    for index, sample in enumerate(dataset.samples):
        if index not in BAD:
            views = make_views(decode_rgb(dataset.read(sample)), TWO_SCALES)
            pixels += sum(view.image.shape[0] * view.image.shape[1] for view in views)
    assert tally.view_pixels == pixels == sum(h * w * views for (h, w), views in stages.view_shapes().items())
    assert tally.padding == pytest.approx(1 - pixels / tally.canvas_pixels)
    assert tally.seconds["compute"] >= 0.01 * tally.batches  # a sleep is never shorter
    assert all(tally.seconds[stage] > 0 for stage in STAGES if stage != "write")
    assert tally.seconds["write"] == 0


def test_a_tally_since_another_is_what_was_done_between_them() -> None:
    stages = Stages()
    stages.add("decode", 1.0)
    stages.batch_packed((2, 30, 40), [(30, 40)], changed=True)
    before = stages.tally()
    stages.add("decode", 0.5)
    stages.image_prepared()
    stages.batch_packed((3, 20, 10), [(20, 10), (10, 10)], changed=False)
    since = stages.tally().since(before)
    assert since.seconds["decode"] == 0.5
    assert (since.images, since.views, since.batches, since.changes) == (1, 2, 1, 0)
    assert since.to_json() == {
        "stages": {"decode": 0.5}, "prepared": 1, "views": 2, "batches": 1, "canvas_changes": 0, "padding": 0.5,
    }  # fmt: skip


def test_time_is_counted_of_a_block_that_fails_too_and_threads_add_up() -> None:
    stages = Stages()

    def work() -> None:
        for _ in range(200):
            with suppress(ValueError), stages.timed("read"):
                raise ValueError
            stages.add("decode", 0.25)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stages.tally().seconds["decode"] == 200.0
    assert stages.tally().seconds["read"] > 0
