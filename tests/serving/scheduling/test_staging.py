"""On a GPU: batches staged during the computation of another, and shape buckets that have run before."""

import asyncio
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prelunet.evaluator.contract import Canvas
from prelunet.evaluator.engine.batching import Batch, BatchPlan, BatchRules, plan_batches
from prelunet.evaluator.engine.session import Outputs, Placement
from prelunet.evaluator.engine.shape_buckets import ShapeBuckets
from prelunet.evaluator.errors import DeviceLost
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.serving import models as models_module
from prelunet.evaluator.serving.models import load_model
from prelunet.evaluator.serving.options import ModelFile
from prelunet.evaluator.serving.scheduling import executor
from prelunet.evaluator.serving.scheduling.model import ServedModel, shape_buckets_of
from tests.helpers.fakes import FakeSession, fake_contract
from tests.serving.event_loop import async_test, until
from tests.serving.scheduling.scheduler_harness import (
    GPU_RULES,
    STAGING,
    SteppedSession,
    build_model,
    dense_protocol,
    occupy_device,
    ready_view_count,
    serve_models,
    stage_batch,
    start_classify,
)
from tests.serving.serving_harness import png


@async_test
async def test_on_a_gpu_only_a_full_batch_is_staged_while_another_is_computed() -> None:
    staged: list[int] = []

    class Staging(SteppedSession):
        def stage(self, images, sizes):
            staged.append(len(images))
            return super().stage(images, sizes)

    session = Staging(**STAGING)

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        tasks = [start_classify(models, png(32, 41, seed), dense_protocol(32)) for seed in range(2)]
        await until(lambda: ready_view_count(models) == 2)
        assert staged == [1], "a batch that could still grow should not be staged"
        tasks += [start_classify(models, png(32, 41, seed), dense_protocol(32)) for seed in (2, 3)]
        await until(lambda: len(staged) == 2)
        assert staged[1] in {2, 3}, "the fourth view may have come before or after"
        session.release_all()
        await asyncio.gather(*tasks)
    assert staged[0] == 1
    assert sum(staged) >= 5
    assert {thread.name for thread in session.computing} == {"compute-cuda-0"}


@async_test
async def test_the_staging_thread_does_not_keep_a_version_whose_views_it_has_looked_at() -> None:
    session = SteppedSession(**STAGING)
    with serve_models(fake=SteppedSession(**STAGING)) as models:
        models.add(ModelFile("old", Path("old.onnx")), session)
        tasks = [await occupy_device(models, session, "old")]
        tasks.append(start_classify(models, png(32, 41), dense_protocol(32), model="old"))
        await until(lambda: ready_view_count(models) == 1)
        session.release_all()
        await asyncio.gather(*tasks)
        models.remove("old", "1")
        freed = weakref.ref(session)
        del session, tasks
        await until(lambda: freed() is None)


@async_test
async def test_enough_views_of_different_shapes_for_no_full_batch_are_not_staged_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, full_checks, is_full = [], [], executor.is_full

    class Staging(SteppedSession):
        def stage(self, images, sizes):
            threads.append(threading.current_thread().name)
            return super().stage(images, sizes)

    def watched(*arguments: object) -> bool:
        full_checks.append(is_full(*arguments))
        return full_checks[-1]

    monkeypatch.setattr(executor, "is_full", watched)
    session = Staging(
        provider="CUDAExecutionProvider", rules=replace(GPU_RULES, max_pixels=3 * 48 * 64, switch_pixels=1)
    )

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        sides = ((32, 41), (48, 61), (41, 32), (61, 48))  # four canvases
        tasks = [start_classify(models, png(*size), dense_protocol(min(size))) for size in (*sides, *sides)]
        await until(lambda: full_checks)
        session.release_all()
        await asyncio.gather(*tasks)
    assert not any(full_checks)
    assert set(threads) == {"compute-cuda-0"}


@pytest.mark.parametrize(
    ("batches", "full"),
    [
        ([Batch((0, 1), 32, 44, 2)], False),
        ([Batch((0, 1, 2), 32, 44, 3)], False),
        ([Batch((0, 1, 2, 3), 32, 44, 4)], True),  # five would fit, but no bucket has five rows
        ([Batch((0, 1), 32, 44, 2), Batch((2,), 48, 64, 1)], False),
        ([Batch((0, 1), 32, 44, 2), Batch((2, 3), 32, 44, 2)], True),  # cut into two of the same size
    ],
)
def test_a_batch_is_full_if_one_more_view_would_not_fit_or_would_join_another(batches: list[Batch], full: bool) -> None:
    rules = replace(GPU_RULES, max_pixels=5 * 32 * 44 + 1)
    session = FakeSession(provider="CUDAExecutionProvider", rules=rules)
    assert executor.is_full(BatchPlan(tuple(batches), 1), build_model(session)) == full


@pytest.mark.parametrize("switch_pixels", [10**6, 0], ids=["known work", "unknown work"])
@async_test
async def test_on_a_gpu_only_canvases_of_the_warm_up_run(switch_pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Quick(FakeSession):
        def compute(self, staged):
            self.calls.append(staged[0].shape)
            rows, classes = len(staged[0]), len(self.contract.classes)
            scores = np.full((rows, classes), 1 / classes, np.float32)
            return Outputs(scores, scores, np.ones((rows, 2), np.int64), lambda: np.zeros((rows, 1, 1, classes)))

    rules = BatchRules(canvas_step=8, max_pixels=2**24, switch_pixels=switch_pixels)
    session = Quick(provider="CUDAExecutionProvider", rules=rules)
    # Not `preallocate`, which would run validation's largest batch; a server never has one that large.
    monkeypatch.setattr(models_module, "open_with_placement", lambda _path, _placement: session)
    loaded = load_model(ModelFile("fake", Path("fake.onnx")), Placement("cuda"))
    most_rows: dict[tuple[int, ...], int] = {}
    for count, *canvas in session.calls:
        most_rows[*canvas] = max(count, most_rows.get((*canvas,), 0))
    assert len(most_rows) > 100
    assert loaded.rules.max_pixels == 2**23, "smaller batches than those of validation"

    with serve_models(fake=loaded) as models:
        session.calls.clear()
        protocol = build_protocol("multi-scale", session.contract)
        images = [png(30 + 7 * seed, 100 - 6 * seed, seed) for seed in range(12)]
        await asyncio.gather(
            *(start_classify(models, image, protocol, client=f"{n}") for n, image in enumerate(images * 4))
        )
    assert session.calls
    buckets = shape_buckets_of(loaded)
    assert buckets is not None
    assert all(count in buckets.rows and count <= most_rows[*canvas] for count, *canvas in session.calls)


def shapes_of(model: ServedModel, *batches: Batch) -> list[tuple[int, int, int]]:
    """Return the shapes in which a model computes batches, one after the other."""
    found = []
    for batch in batches:
        computed = model.in_prepared_shape(batch)
        assert computed.indices == batch.indices
        found.append((computed.rows, computed.height, computed.width))
    return found


LARGE, HALF, WIDE = Batch((0, 1, 2), 48, 64, 4), Batch((0, 1), 48, 64, 2), Batch((0,), 32, 80, 1)


def gpu_model(
    prepared_shapes: int, *, canvas: Canvas = "ragged", provider: str = "CUDAExecutionProvider"
) -> ServedModel:
    """Return a served model whose changes of shape cost as much as five canvases of 48x64."""
    rules = replace(GPU_RULES, switch_pixels=5 * 48 * 64)
    session = FakeSession(fake_contract(canvas=canvas), provider=provider, rules=rules)
    session.prepared_shapes = prepared_shapes
    return build_model(session)


def test_on_a_gpu_a_batch_keeps_a_larger_shape_until_as_much_was_computed_in_vain_as_a_change_costs() -> None:
    model = gpu_model(1)
    assert shapes_of(model, LARGE, HALF, LARGE, HALF, HALF) == [(4, 48, 64)] * 4 + [(2, 48, 64)]
    assert shapes_of(model, LARGE, HALF, HALF, WIDE) == [(4, 48, 64)] * 3 + [(1, 32, 80)], "wider than the others"


def test_on_a_gpu_a_batch_takes_the_smallest_of_the_last_shapes_that_is_large_enough() -> None:
    small = Batch((0,), 48, 60, 1)
    model = gpu_model(3)
    assert shapes_of(model, LARGE, WIDE, small, small) == [(4, 48, 64), (1, 32, 80), (4, 48, 64), (1, 48, 60)]
    assert shapes_of(model, small, LARGE, WIDE) == [(1, 48, 60), (4, 48, 64), (1, 32, 80)], "all three are kept"
    other = Batch((0,), 28, 96, 1)
    assert shapes_of(model, other, small) == [(1, 28, 96), (4, 48, 64)], "a fourth replaces the oldest"


def test_a_file_for_exact_canvases_keeps_rows_but_no_larger_canvas() -> None:
    batches = Batch((0, 1), 32, 44, 4), Batch((0,), 32, 44, 1), Batch((0,), 28, 28, 1)
    assert shapes_of(gpu_model(2, canvas="exact"), *batches) == [(4, 32, 44), (4, 32, 44), (1, 28, 28)]


def test_on_a_cpu_every_batch_has_its_own_shape() -> None:
    assert shapes_of(gpu_model(1, provider="CPUExecutionProvider"), LARGE, HALF) == [(4, 48, 64), (2, 48, 64)]


@async_test
async def test_where_most_changes_are_free_fewer_shapes_share_a_canvas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight views of two shapes: the padding costs less than a change of shape, but more than a quarter of one."""
    shapes, canvases, plan_views = [(40, 64), (64, 40)] * 4, [], executor.plan_views

    def planned(session: FakeSession, views: object, buckets: ShapeBuckets, rules: BatchRules) -> BatchPlan:
        grid, largest = session.contract.window_grid, session.contract.max_side
        plan = plan_batches(shapes, grid, rules, max_side=largest, shape_buckets=buckets)
        canvases.append({(batch.height, batch.width) for batch in plan.batches})
        return plan_views(session, views, buckets, rules)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "plan_views", planned)
    for prepared_shapes in (1, 16):
        session = gpu_model(prepared_shapes).session
        with serve_models(fake=session) as models:
            await start_classify(models, png(40, 64, 1), build_protocol("center", session.contract))
    assert canvases == [{(64, 64)}, {(44, 64), (64, 44)}]


@async_test
async def test_a_lost_device_is_reported_once_even_if_the_next_batch_is_staged() -> None:
    def lost(_images: np.ndarray) -> None:
        raise DeviceLost("planted")

    reported: list[DeviceLost] = []
    session = SteppedSession(**STAGING, fail=lost)

    with serve_models(on_lost=reported.append, fake=session) as models:
        first, tasks = await stage_batch(models, session)
        session.release_all()
        for task in (first, *tasks):
            with pytest.raises(DeviceLost, match="planted"):
                await task
    assert session.entered == 2
    assert len(reported) == 1
