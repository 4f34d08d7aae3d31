"""The threads of a process, while other processes of its server compute on the same cores."""

import asyncio

import pytest

from prelunet.evaluator.serving.options import QueueOptions
from prelunet.evaluator.serving.scheduling import shared_cores
from prelunet.evaluator.serving.scheduling.shared_cores import SharedCores
from tests.serving.event_loop import async_test, until
from tests.serving.scheduling.scheduler_harness import occupy_device, ready_view_count, serve_models, start_classify
from tests.serving.scheduling.test_lanes import PROTOCOL, with_lanes
from tests.serving.serving_harness import png


@pytest.mark.parametrize(
    ("others", "threads"),
    [
        ([], 7),
        ([3], 4),  # half, rounded up
        ([7], 4),  # the other has more than its half, until its threads end what they do
        ([1], 6),  # what the other leaves
        ([1, 3], 3),
        ([1, 1], 5),
        ([1] * 6, 1),
        ([1] * 8, 1),
    ],
)
def test_processes_that_compute_have_equal_parts_of_the_cores_and_what_the_others_leave(
    monkeypatch: pytest.MonkeyPatch, others: list[int], threads: int
) -> None:
    monkeypatch.setattr(shared_cores, "cores", lambda: 7)
    notes = bytearray(9)
    own = SharedCores(notes, 5)
    for number, computing in zip((1, 2, 3, 4, 6, 7, 8, 9), others, strict=False):
        SharedCores(notes, number).note(computing)
    for computing in (0, 1, 7):
        own.note(computing)
        assert min(7, own.threads()) == threads


@async_test
async def test_while_another_process_computes_only_this_ones_part_of_the_threads_works() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_cores, "cores", lambda: 4)
        notes, session = bytearray(2), with_lanes()
        session.lanes, queue = 4, QueueOptions(turn_cost=0, cores=SharedCores(notes, 1))
    with serve_models(queue, fake=session) as models:
        await until(lambda: not notes[0])
        first = await occupy_device(models, session)
        assert notes[0] == 1, "the others see that one thread of this process computes"
        notes[1] = 4
        tasks = [start_classify(models, png(64, 72, seed), PROTOCOL) for seed in range(8)]
        await until(lambda: ready_view_count(models) == 8)
        session.release_batches()
        await until(lambda: session.entered == 3)
        await asyncio.sleep(0.1)  # a third thread would have come
        assert session.entered == 3, "two of four threads compute"
        notes[1] = 0
        tasks.append(start_classify(models, png(64, 72), PROTOCOL))
        await until(lambda: session.entered == 5)
        notes[1] = 4
        session.release_batches(2)  # two of four end, and wait
        await asyncio.sleep(0.1)
        assert session.entered == 5
        session.release_all()
        for task in [first, *tasks]:
            await task
        await until(lambda: not notes[0])
