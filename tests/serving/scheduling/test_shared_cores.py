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


@pytest.mark.parametrize(("others", "part"), [(1, 4), (2, 3), (7, 1)])
def test_the_processes_that_compute_divide_the_cores_and_round_up(
    monkeypatch: pytest.MonkeyPatch, others: int, part: int
) -> None:
    monkeypatch.setattr(shared_cores, "cores", lambda: 7)
    notes = bytearray(9)
    processes = [SharedCores(notes, number) for number in range(1, 10)]
    assert all(each.threads() >= 7 for each in processes), "none computes, so each has all cores"
    processes[4].note(computes=True)
    assert processes[4].threads() >= 7, "alone it still has all"
    for other in processes[5:] + processes[:4]:
        if sum(notes) <= others:
            other.note(computes=True)
    assert processes[4].threads() == part
    for other in processes[:4] + processes[5:]:
        other.note(computes=False)
    assert processes[4].threads() >= 7


def test_a_process_never_has_less_than_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cores, "cores", lambda: 1)
    assert SharedCores(bytearray([0, 1, 1, 1, 1]), 1).threads() == 1


@async_test
async def test_while_another_process_computes_only_this_ones_part_of_the_threads_works() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_cores, "cores", lambda: 4)
        notes, session = bytearray(2), with_lanes()
        session.lanes, queue = 4, QueueOptions(turn_cost=0, cores=SharedCores(notes, 1))
    with serve_models(queue, fake=session) as models:
        await until(lambda: not notes[0])
        first = await occupy_device(models, session)
        assert notes[0], "the others see that this process computes"
        notes[1] = True
        tasks = [start_classify(models, png(64, 72, seed), PROTOCOL) for seed in range(8)]
        await until(lambda: ready_view_count(models) == 8)
        session.release_batches()
        await until(lambda: session.entered == 3)
        await asyncio.sleep(0.1)  # a third thread would have come
        assert session.entered == 3, "two of four threads compute"
        notes[1] = False
        tasks.append(start_classify(models, png(64, 72), PROTOCOL))
        await until(lambda: session.entered == 5)
        notes[1] = True
        session.release_batches(2)  # two of four end, and wait
        await asyncio.sleep(0.1)
        assert session.entered == 5
        session.release_all()
        for task in [first, *tasks]:
            await task
        await until(lambda: not notes[0])
