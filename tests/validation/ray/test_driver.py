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
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.validation.ray_cluster import (
    MAX_TASKS_AHEAD,
    Cluster,
    evaluate_on_ray,
    results_in_order,
    worker_capacity,
)
from tests.validation.ray.cluster_data import info_of


class FakeRay:
    """A fake of Ray's module, on which the task whose results are needed first ends last."""

    def __init__(self) -> None:
        self.running, self.most_running, self.started = list[list[str]](), 0, 0

    class exceptions:  # noqa: N801 - as Ray names it
        RayError = RayTaskError = ZeroDivisionError

    def start(self, group: Sequence[Sequence[Sample]]) -> list[str]:
        """Return a task: the names of the first images of its chunks, which are its results."""
        task = [chunk[0].file for chunk in group]
        self.started += 1
        self.running.append(task)
        self.most_running = max(self.most_running, len(self.running))
        return task

    def wait(self, waiting: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
        self.running.remove(waiting[-1])
        return waiting[-1:], waiting[:-1]

    def get(self, task: list[str]) -> list[str]:
        if task in self.running:
            self.running.remove(task)
        return task

    def results(self, chunks: int, workers: int) -> Iterator[Any]:
        listed = some_chunks(chunks)
        groups = (listed[start : start + 2] for start in range(0, chunks, 2))
        return results_in_order(self, self.start, groups, workers)  # type: ignore[arg-type]


def some_chunks(count: int) -> list[list[Sample]]:
    return [[Sample(f"{number}-first", 0, 1), Sample(f"{number}-last", 0, 1)] for number in range(count)]


def test_chunks_come_in_their_order_while_workers_run_ahead_of_a_slow_one_but_not_far() -> None:
    ray, ahead = FakeRay(), []
    for number, name in enumerate(ray.results(500, 3)):
        assert name == f"{number}-first"
        ahead.append(ray.started - number // 2)
    assert len(ahead) == 500
    assert ray.most_running == 3, "as many tasks at a time as workers"
    assert max(ahead) == MAX_TASKS_AHEAD * 3 + 1


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


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999", "ray://127.0.0.1:6379"])
def test_an_address_where_nothing_listens_is_an_error_with_the_fix(
    session: Session, model: Path, dataset: Dataset, address: str
) -> None:
    with pytest.raises(
        EnvironmentFault, match=rf"--ray {re.escape(address)}: cannot join or start a cluster .*HOST:PORT"
    ):
        evaluated_on(address, session, model, dataset)


@pytest.mark.parametrize("address", ["", "6379", ":6379", "127.0.0.1:", "127.0.0.1:port", "LOCAL", "head:6379 "])
def test_an_address_without_host_or_port_is_refused_before_a_run_folder_is_created(
    address: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    order = ["--model", model, "--data", data, "--run", folder, f"--ray={address}"]
    assert run(["validate", *map(str, order)]) == 2
    assert "HOST:PORT" in capsys.readouterr().err
    assert not folder.exists()
