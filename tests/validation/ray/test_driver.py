"""The driver of a cluster alone, with a fake Ray whose tasks end in an order that the test chooses."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import EnvironmentFault, UsageError
from prelunet.evaluator.validation.ray_cluster import (
    MAX_CHUNKS_AHEAD,
    MAX_GROUP,
    Cluster,
    divide,
    evaluate_on_ray,
    results_in_order,
    worker_capacity,
)
from tests.validation.ray.cluster_data import info_of


class FakeTask:
    """A task whose results are the names of the first images of its chunks."""

    def __init__(self, group: Sequence[Sequence[Sample]]):
        self.names = [chunk[0].file for chunk in group]

    def completed(self) -> tuple["FakeTask"]:
        return (self,)

    def __next__(self) -> str:
        return self.names.pop(0)


class FakeRay:
    """A fake of Ray's module, on which the task whose results are needed first ends last.

    silences: how often nothing is ready before each thing that is.
    """

    def __init__(self, silences: Sequence[int] = ()):
        self.silences, self.running, self.most_running, self.started = list(silences), set[FakeTask](), 0, 0

    class exceptions:  # noqa: N801 - as Ray names it
        RayError = RayTaskError = ZeroDivisionError

    def start(self, group: Sequence[Sequence[Sample]]) -> FakeTask:
        task = FakeTask(group)
        self.started += len(group)
        self.running.add(task)
        self.most_running = max(self.most_running, len(self.running))
        return task

    def wait(self, waiting: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        *ends, oldest = waiting
        if self.silences:
            self.silences[0] -= 1
            if self.silences[0] >= 0:
                return [], waiting
            self.silences.pop(0)
        ready = next((end for end in ends if end != (oldest,)), oldest)
        self.running.discard(oldest if ready is oldest else ready[0])
        return [ready], [other for other in waiting if other is not ready]

    def get(self, result: str) -> str:
        return result

    def results(self, chunks: int, workers: int, said: list[str]) -> Iterator[Any]:
        listed = some_chunks(chunks)
        groups = divide(listed, workers)
        return results_in_order(self, self.start, groups, workers, said.append)  # type: ignore[arg-type]


def some_chunks(count: int) -> list[list[Sample]]:
    return [[Sample(f"{number}-first", 0, 1), Sample(f"{number}-last", 0, 1)] for number in range(count)]


def test_chunks_come_in_their_order_while_workers_run_ahead_of_a_slow_one_but_not_far() -> None:
    ray, ahead = FakeRay(), []
    for number, name in enumerate(ray.results(500, 3, [])):
        assert name == f"{number}-first"
        ahead.append(ray.started - number)
    assert len(ahead) == 500
    assert ray.most_running == 3, "as many tasks at a time as workers"
    assert 2 * 3 * MAX_GROUP < max(ahead) < MAX_CHUNKS_AHEAD * 3 + MAX_GROUP


def test_silence_is_reported_less_and_less_often_with_the_images_that_are_missing() -> None:
    said: list[str] = []
    assert len(list(FakeRay(silences=[3, 0, 1]).results(2, 1, said))) == 2
    expected = [(30, 0), (60, 0), (120, 0), (30, 1)]  # anything that is ready resets the time
    for text, (seconds, chunk) in zip(said, expected, strict=True):
        assert text.startswith(f"Ray: no result for {seconds} s; waiting for images from {chunk}-first on")


@pytest.mark.parametrize(("chunks", "workers"), [(1, 1), (1, 8), (3, 4), (10, 4), (100, 3), (1000, 2)])
def test_every_worker_gets_a_group_and_the_last_groups_are_small(chunks: int, workers: int) -> None:
    listed = some_chunks(chunks)
    groups = list(divide(listed, workers))
    assert [chunk for group in groups for chunk in group] == listed
    assert len(groups) >= min(chunks, workers)
    assert [len(group) for group in groups[-workers:]] == [1] * min(chunks, workers)
    assert len(groups[0]) == {100: MAX_GROUP, 1000: MAX_GROUP}.get(chunks, 1)


# Requests to the cluster


@pytest.mark.parametrize(
    ("machines", "cpus", "gpu", "expected"),
    [
        ([{"CPU": 8.0}, {"CPU": 5.0}], 0, False, (4, 3)),
        ([{"CPU": 8.0}, {"CPU": 3.0}], 0, False, (3, 3)),
        ([{"CPU": 8.0}, {"CPU": 3.0}], 5, False, (5, 1)),
        ([{"CPU": 64.0, "GPU": 4.0}, {"CPU": 2.0}], 0, True, (4, 4)),
        ([{"CPU": 6.0, "GPU": 4.0}, {"memory": 5.0}], 0, True, (4, 1)),
    ],
)
def test_as_many_workers_are_requested_as_fit_on_the_machines(
    machines: list[dict[str, float]], cpus: int, gpu: bool, expected: tuple[int, int]
) -> None:
    assert worker_capacity(machines, cpus, gpu=gpu) == expected


@pytest.mark.parametrize(("machines", "cpus", "gpu"), [([{"CPU": 2.0}], 3, False), ([{"CPU": 8.0}], 0, True)])
def test_a_cluster_too_small_for_a_worker_is_an_error(machines: list[dict[str, float]], cpus: int, gpu: bool) -> None:
    with pytest.raises(EnvironmentFault, match=r"none of the cluster's 1 machines has .* CPUs"):
        worker_capacity(machines, cpus, gpu=gpu)


def evaluated_on(address: str, session: Session, model: Path, dataset: Dataset) -> None:
    evaluate = evaluate_on_ray(Cluster(address), session, model, dataset, info_of(session, dataset))
    next(evaluate([dataset.samples[:1]]))


def test_without_ray_the_error_shows_how_to_install_it(
    session: Session, model: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFault, match=r"ray cannot be imported .*pip install .*\[ray\]'"):
        evaluated_on("local", session, model, dataset)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1"])
def test_an_address_where_nothing_listens_is_an_error_with_the_fix(
    session: Session, model: Path, dataset: Dataset, address: str
) -> None:
    with pytest.raises(
        EnvironmentFault, match=rf"--ray {re.escape(address)}: cannot join or start a cluster .*HOST:PORT"
    ):
        evaluated_on(address, session, model, dataset)


NO_ADDRESSES = [
    "",
    " ",
    ":",
    ":6379",
    ":-1",
    "127.0.0.1",
    "127.0.0.1:",
    "127.0.0.1:0",
    "127.0.0.1:-1",
    "127.0.0.1:port",
    "127.0.0.1:65536",
    "127.0.0.1:99999",
    "127.0.0.1:\u0666\u0663\u0667\u0669",
    "127.0.0.1:6379 ",
    "127.0.0.1:6379\n",
    "::1:6379",
    "LOCAL",
    "auto ",
    "ray://127.0.0.1:6379",
]


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_an_invalid_address_is_refused_with_the_fix(address: str) -> None:
    with pytest.raises(UsageError, match=r"--ray '.*': not the address .* HOST:PORT .* auto .* local"):
        Cluster(address)


@pytest.mark.parametrize("address", ["auto", "local", "head:6379", "a-b.c_d:1", "10.0.0.1:65535", "[fe80::1]:6379"])
def test_a_valid_address_is_kept(address: str) -> None:
    assert Cluster(address).address == address


def test_an_invalid_address_is_refused_before_a_run_folder_is_created(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    order = ["--model", model, "--data", data, "--run", folder, "--ray", "127.0.0.1"]
    assert run(["validate", *map(str, order)]) == 2
    assert "HOST:PORT" in capsys.readouterr().err
    assert not folder.exists()
