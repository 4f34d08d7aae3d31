import threading
from concurrent.futures import Future

import numpy as np
import pytest

from evaluator.engine.batching import BatchRules
from evaluator.engine.classify import run_views
from evaluator.imaging.views import ViewImage
from evaluator.protocols import View
from evaluator.serving.compute import ComputeThread
from fakes import FakeSession


class GatedSession(FakeSession):
    """A fake whose every run waits until the gate is open, and which fails on canvases of a given width."""

    def __init__(self, fails_at_width: int | None = None, rules: BatchRules | None = None) -> None:
        super().__init__(rules=rules)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self._fails_at_width = fails_at_width

    def run(self, images, sizes):
        self.entered.set()
        assert self.gate.wait(30)
        if images.shape[2] == self._fails_at_width:
            self.calls.append(images.shape)
            raise RuntimeError(f"planted fault at width {images.shape[2]}")
        return super().run(images, sizes)


def view(height: int, width: int, seed: int) -> ViewImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return ViewImage(View(min(height, width), mirrored=False), pixels, capped=False)


@pytest.fixture
def gated():
    session = GatedSession()
    compute = ComputeThread(session, "gated")
    yield session, compute
    session.gate.set()
    compute.close()


def occupy(session: GatedSession, compute: ComputeThread) -> Future:
    """Submit one view and return when the thread is busy with it, so that what follows has to wait."""
    future = compute.submit([view(28, 28, seed=9)])
    assert session.entered.wait(30)
    return future


def test_views_of_several_requests_share_a_batch_and_get_the_results_they_get_alone(gated) -> None:
    session, compute = gated
    occupy(session, compute)
    requests = [[view(32, 41, seed=1), view(48, 61, seed=2)], [view(32, 41, seed=3)], [view(32, 41, seed=4)]]
    futures = [compute.submit(views) for views in requests]
    session.gate.set()
    together = [future.result(30) for future in futures]
    assert session.calls == [(1, 28, 28, 3), (3, 32, 41, 3), (1, 48, 61, 3)]
    for views, results in zip(requests, together, strict=True):
        for alone, result in zip(run_views(FakeSession(), views), results, strict=True):
            np.testing.assert_array_equal(result.scores, alone.scores)
            assert (result.height, result.width, result.windows) == (alone.height, alone.width, alone.windows)


def test_a_request_that_comes_while_a_batch_runs_joins_the_next_one(gated) -> None:
    session, compute = gated
    occupy(session, compute)
    first = compute.submit([view(32, 41, seed=1)])
    second = compute.submit([view(28, 28, seed=2)])
    late = compute.submit([view(32, 41, seed=3)])
    session.gate.set()
    for future in (first, second, late):
        future.result(30)
    assert session.calls[1:] == [(2, 32, 41, 3), (1, 28, 28, 3)]  # the longest waiting view's shape goes first


def test_a_batch_runs_on_the_canvas_that_was_planned_for_it_among_all_that_waits() -> None:
    """Eight small views wait before eight large ones: planned anew alone they would get a smaller canvas.

    That would cost a GPU new plans twice.
    """
    rules = BatchRules(canvas_step=4, max_windows=1000, max_pixels=8 * 48 * 64, switch_pixels=10**6)
    session = GatedSession(rules=rules)
    compute = ComputeThread(session, "planned")
    occupied = occupy(session, compute)
    shapes = [*[(32, 41)] * 8, *[(48, 61)] * 8]
    futures = [compute.submit([view(*shape, seed)]) for seed, shape in enumerate(shapes)]
    session.gate.set()
    found = [future.result(30)[0] for future in (occupied, *futures)][1:]
    compute.close()
    assert session.calls == [(1, 28, 28, 3), (8, 48, 64, 3), (8, 48, 64, 3)]
    for seed, (shape, result) in enumerate(zip(shapes, found, strict=True)):
        (alone,) = run_views(FakeSession(), [view(*shape, seed)])
        np.testing.assert_array_equal(result.scores, alone.scores)


def test_a_failing_batch_fails_the_requests_in_it_and_no_others() -> None:
    session = GatedSession(fails_at_width=41)
    compute = ComputeThread(session, "failing")
    occupied = occupy(session, compute)
    failing = compute.submit([view(32, 41, seed=1), view(48, 61, seed=2)])
    also_failing = compute.submit([view(32, 41, seed=3)])
    neighbour = compute.submit([view(48, 61, seed=4)])
    session.gate.set()
    for future in (failing, also_failing):
        with pytest.raises(RuntimeError, match="planted fault"):
            future.result(30)
    assert len(neighbour.result(30)) == len(occupied.result(30)) == 1
    assert session.calls[-1] == (1, 48, 61, 3), "the failed request's other view should not be computed"
    assert len(compute.submit([view(30, 33, seed=5)]).result(30)) == 1, "the thread should live on"
    compute.close()


def test_waiting_views_of_a_cancelled_request_are_never_computed(gated) -> None:
    session, compute = gated
    occupied = occupy(session, compute)
    cancelled = compute.submit([view(32, 41, seed=1)])
    other = compute.submit([view(48, 61, seed=2)])
    assert cancelled.cancel()
    session.gate.set()
    assert len(other.result(30)) == len(occupied.result(30)) == 1
    assert session.calls == [(1, 28, 28, 3), (1, 48, 61, 3)]


def test_cancelling_in_the_middle_of_a_run_disturbs_nobody(gated) -> None:
    session, compute = gated
    running = occupy(session, compute)
    other = compute.submit([view(48, 61, seed=2)])
    assert running.cancel()
    session.gate.set()
    assert len(other.result(30)) == 1


def test_one_thread_runs_the_session_and_closing_ends_it() -> None:
    runs = []

    class Recording(FakeSession):
        def run(self, images, sizes):
            runs.append(threading.current_thread())
            return super().run(images, sizes)

    compute = ComputeThread(Recording(), "recording")
    for seed in range(3):
        compute.submit([view(32, 41, seed)]).result(30)
    compute.close()
    assert len(runs) == 3
    assert {thread.name for thread in runs} == {"compute-recording"}
    assert len(set(runs)) == 1
    assert not runs[0].is_alive()


def test_closing_finishes_what_waits() -> None:
    session = GatedSession()
    compute = ComputeThread(session, "closing")
    futures = [occupy(session, compute), compute.submit([view(32, 41, seed=1)])]
    session.gate.set()
    compute.close()
    assert all(future.done() for future in futures)
