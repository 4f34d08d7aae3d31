"""The stage timer of the pipeline and its counters."""

import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.imaging.views import make_views
from prelunet.evaluator.validation.pipeline import evaluate_chunks
from prelunet.evaluator.validation.timing import STAGES, StageTimer
from tests.helpers.fakes import FakeSession
from tests.validation.shared_data import BAD, IMAGES, SHARED_CANVASES, TWO_SCALES, no_thread_is_left, write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_dataset(tmp_path_factory.mktemp("data") / "val")


_no_thread_is_left = pytest.fixture(autouse=True)(no_thread_is_left)


def test_stages_and_counts_are_those_of_the_work_done(dataset: Dataset) -> None:
    class Slow(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            time.sleep(0.01)
            return super().compute(staged)

    session, timer = Slow(rules=SHARED_CANVASES), StageTimer()
    list(evaluate_chunks([session], dataset, TWO_SCALES, [dataset.samples], 20, 2, timer=timer))
    totals = timer.totals()
    assert (totals.images, totals.views) == (IMAGES, len(TWO_SCALES.views) * (IMAGES - len(BAD)))
    assert totals.batches == len(session.calls)
    assert totals.canvas_changes == 1 + sum(a != b for a, b in zip(session.calls, session.calls[1:], strict=False))
    assert totals.canvas_pixels == sum(rows * height * width for rows, height, width, _ in session.calls)
    pixels = 0
    for index, sample in enumerate(dataset.samples):
        if index not in BAD:
            views = make_views(decode_rgb(dataset.read(sample)), TWO_SCALES)
            pixels += sum(view.image.shape[0] * view.image.shape[1] for view in views)
    assert totals.view_pixels == pixels
    assert totals.padding == pytest.approx(1 - pixels / totals.canvas_pixels)
    assert totals.seconds["compute"] >= 0.01 * totals.batches  # a sleep is never shorter
    assert all(totals.seconds[stage] > 0 for stage in STAGES)


def test_the_time_of_a_failing_block_counts_and_threads_add_up() -> None:
    timer = StageTimer()

    def work() -> None:
        for _ in range(200):
            with suppress(ValueError), timer.timed("read"):
                raise ValueError
            timer.add("decode", 0.25)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timer.totals().seconds["decode"] == 200.0
    assert timer.totals().seconds["read"] > 0
