"""The driver of a cluster alone, with a fake Ray whose answers come in an order that the test chooses."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import EnvironmentFault, UsageError
from prelunet.evaluator.validation.ray_cluster import (
    MAX_ATTEMPTS,
    MAX_CHUNKS_AHEAD,
    STALL_SECONDS,
    Cluster,
    WorkerPool,
    evaluate_on_ray,
    worker_capacity,
)
from prelunet.evaluator.validation.validate import WorkersLost
from tests.validation.ray.cluster_data import info_of


@dataclass
class ScriptedRay:
    """A fake of Ray's module: the test chooses which answers come next, and which report a lost worker.

    order: of answers, the smallest comes first; lost: whether an answer is none; silences: how often none comes before
    each one.
    """

    order: Callable[["PendingAnswer"], Any] = lambda pending: pending.serial
    lost: Callable[["PendingAnswer"], bool] = lambda _: False
    silences: list[int] = field(default_factory=list)
    actors: list["ScriptedWorker"] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)  # chunks, in the order of distribution
    serials: Iterator[int] = field(default_factory=count)

    class exceptions:  # noqa: N801 - as Ray names it
        RayError = KeyError
        RayTaskError = ZeroDivisionError

    def start_actor(self) -> "ScriptedWorker":
        self.actors.append(ScriptedWorker(self, len(self.actors)))
        return self.actors[-1]

    def wait(
        self, pending: list["PendingAnswer"], *, num_returns: int, timeout: float
    ) -> tuple[list["PendingAnswer"], list["PendingAnswer"]]:
        assert (num_returns, timeout) == (1, STALL_SECONDS)
        if self.silences:
            self.silences[0] -= 1
            if self.silences[0] >= 0:
                return [], pending
            self.silences.pop(0)
        return [min(pending, key=self.order)], []

    def get(self, answer: "PendingAnswer") -> Any:
        if self.lost(answer):
            answer.worker.alive = False
            raise KeyError("on purpose")
        return f"place {answer.worker.number}" if answer.chunk is None else ([answer.chunk], np.zeros((1, 2)))

    def kill(self, worker: "ScriptedWorker") -> None:
        worker.alive = False

    def pool(self, workers: int, chunks: int, said: list[str]) -> list[int]:
        """Return the chunks in the order in which they are yielded."""
        listed = [[Sample(f"{number}-first", 0, 1), Sample(f"{number}-last", 0, 1)] for number in range(chunks)]
        pool: Any = WorkerPool(self, self.start_actor, workers, listed, said.append)  # type: ignore[arg-type]
        return [number for (number,), _ in pool.results()]


class ScriptedWorker:
    """A fake of an actor's handle."""

    def __init__(self, ray: ScriptedRay, number: int):
        self.ray, self.number, self.alive = ray, number, True
        self.start = SimpleNamespace(remote=lambda: self._owe(None))
        self.evaluate = SimpleNamespace(remote=self._begin)

    def _begin(self, samples: Sequence[Sample]) -> "PendingAnswer":
        chunk = int(samples[0].file.partition("-")[0])
        self.ray.begun.append(chunk)
        return self._owe(chunk)

    def _owe(self, chunk: int | None) -> "PendingAnswer":
        assert self.alive, "a lost worker is given something to do"
        return PendingAnswer(next(self.ray.serials), self, chunk)


@dataclass(frozen=True)
class PendingAnswer:
    """The answer to a numbered call; chunk: None for a start."""

    serial: int
    worker: ScriptedWorker
    chunk: int | None


def test_chunks_come_in_their_order_and_no_worker_runs_far_ahead_of_a_slow_one() -> None:
    # The first chunk is answered when no other answers are pending.
    ray = ScriptedRay(order=lambda pending: (pending.chunk is not None, -(pending.chunk or 0)))
    listed: Any = [[Sample(f"{number}-first", 0, 1)] for number in range(40)]
    numbers: list[int] = []
    for lines, _ in WorkerPool(ray, ray.start_actor, 3, listed, lambda _: None).results():  # type: ignore[arg-type]
        numbers.append(lines[0])  # type: ignore[arg-type]
        assert max(ray.begun) < numbers[-1] + MAX_CHUNKS_AHEAD * 3
    assert numbers == list(range(40))
    assert sorted(ray.begun) == list(range(40))


@pytest.mark.parametrize("losses", [MAX_ATTEMPTS - 1, MAX_ATTEMPTS])
def test_a_chunk_is_given_up_with_the_third_worker_lost_on_it(losses: int) -> None:
    ray = ScriptedRay(lost=lambda pending: pending.chunk == 0 and ray.begun.count(0) <= losses)
    said: list[str] = []
    if losses < MAX_ATTEMPTS:
        assert ray.pool(1, 1, said) == [0]
    else:
        with pytest.raises(WorkersLost, match="3 workers were lost while evaluating images 0-first to 0-last"):
            ray.pool(1, 1, said)
    assert ray.begun == [0] * MAX_ATTEMPTS
    assert len(said) == MAX_ATTEMPTS - 1


@pytest.mark.parametrize("losses", [2 * MAX_ATTEMPTS - 1, 2 * MAX_ATTEMPTS])
def test_starts_are_given_up_with_the_third_loss_for_each_worker(losses: int) -> None:
    ray = ScriptedRay(lost=lambda pending: pending.worker.number < losses)
    if losses < 2 * MAX_ATTEMPTS:
        assert ray.pool(2, 9, []) == list(range(9))
    else:
        with pytest.raises(WorkersLost, match="6 workers in a row were lost while starting"):
            ray.pool(2, 9, [])
        assert len(ray.actors) == 2 + losses - 1


def test_occasional_failed_starts_do_not_end_a_run() -> None:
    """One of three workers starts, finishes a chunk and is lost with the next: a long run on an unreliable cluster."""

    def lost(pending: PendingAnswer) -> bool:
        return pending.worker.number % 3 < 2 if pending.chunk is None else ray.begun.count(pending.chunk) < 2

    ray = ScriptedRay(lost=lost)
    assert ray.pool(1, 20, []) == list(range(20))
    assert len(ray.actors) > 20


def test_a_lost_worker_with_free_slots_gets_no_more_chunks() -> None:
    """The first chunk is lost when only it is pending, because no chunk beyond MAX_CHUNKS_AHEAD was started."""
    ray = ScriptedRay(
        order=lambda pending: (pending.chunk == 0, pending.serial),
        lost=lambda pending: pending.chunk == 0 and ray.begun.count(0) == 1,
    )
    assert ray.pool(1, 2 * MAX_CHUNKS_AHEAD, []) == list(range(2 * MAX_CHUNKS_AHEAD))
    assert ray.begun[: MAX_CHUNKS_AHEAD + 1] == [*range(MAX_CHUNKS_AHEAD), 0], (
        "the lost worker has no room left, and the test shows nothing"
    )
    assert [worker.alive for worker in ray.actors] == [False, True]


def test_a_stall_is_reported_with_the_images_and_the_worker() -> None:
    ray = ScriptedRay(silences=[1, 5, 0, 1])  # before the starts of both workers, the first chunk, the second
    said: list[str] = []
    assert ray.pool(2, 9, said) == list(range(9))
    assert said[0] == "Ray: the cluster has no room for a worker yet; waiting"
    expected = [(30, 0), (60, 0), (120, 0), (30, 1)]  # after 1, 2, 4 times STALL_SECONDS, reset by an answer
    for text, (seconds, chunk) in zip(said[1:], expected, strict=True):
        images = f"images {chunk}-first to {chunk}-last from place 0."
        assert text.startswith(f"Ray: no answer for {seconds} s; waiting for {images}")


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
