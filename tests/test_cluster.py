"""Validation on a Ray cluster: the bytes of a run on one machine, whatever happens to the workers and to the driver."""

import hashlib
import json
import os
import pickle
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image

from conftest import Exported
from evaluator.cli import run
from evaluator.datasets.opening import open_dataset
from evaluator.datasets.sample import Dataset, Sample
from evaluator.engine.classify import Model
from evaluator.engine.session import Placement, Session, open_session
from evaluator.errors import ContractError, DatasetError, EnvironmentFault, Interrupted, PreluNetError, UsageError
from evaluator.files import sha256_of
from evaluator.protocols import Protocol, make_protocol
from evaluator.validation.cluster import (
    AHEAD,
    ATTEMPTS,
    PATIENCE,
    Cluster,
    Crew,
    Job,
    Worker,
    on_ray,
    room,
)
from evaluator.validation.joining import connected
from evaluator.validation.pipeline import ChunkResult, evaluate_chunks
from evaluator.validation.run import CHUNK, Batching, RunInfo, describe_dataset, run_info
from evaluator.validation.validate import WorkersLost
from fakes import repeated, validated
from nursery import nursery
from ray_workers import Dying, Mistaken, OtherThere, Stillborn

Validate = Callable[..., list[str]]
RESULT = ("run.json", "predictions.jsonl", "scores.f32.npy")
IMAGES = 100
COPIES = 9  # of each image
TOTAL = IMAGES * COPIES
CHUNKS = -(-TOTAL // CHUNK)
CPUS = 2
KILLS = 3  # of the driver

HEAD = """
import os, sys
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
context = ray.init("local", num_cpus=int(sys.argv[1]), include_dashboard=False, log_to_driver=False)
print("address", context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Head:
    """A Ray cluster of two CPUs on this machine."""

    process: "subprocess.Popen[str]"
    address: str

    def workers(self) -> list[int]:
        """Return the process ids of our workers on this cluster."""
        return [pid for pid, title in descendants(self.process.pid) if title.startswith("ray::Worker")]


def descendants(pid: int) -> list[tuple[int, str]]:
    """Return the processes below a process, with their titles."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            try:
                title = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [(int(child), title), *descendants(int(child))]
            except FileNotFoundError:
                continue
    return found


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """Start a cluster that asks for a token of its own, as those of newer Rays do."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        environment.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))  # for the workers
        with started() as head:
            yield head


@contextmanager
def started() -> Iterator[Head]:
    with subprocess.Popen(
        [sys.executable, "-c", HEAD, str(CPUS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("address "):
                break
        else:
            pytest.fail(f"Ray did not start: {''.join(said)}")
        yield Head(process, said[-1].split()[1])
        process.communicate("")


@pytest.fixture(scope="module")
def model(exported: dict[str, Exported]) -> Path:
    return exported["demo-channel"].path


@pytest.fixture(scope="module")
def session(model: Path) -> Session:
    return open_session(model, "cpu", threads=1)


@pytest.fixture(scope="module")
def data(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay out images of 12 sizes in the folders of four classes; one is damaged."""
    folder = tmp_path_factory.mktemp("data") / "val"
    rng = np.random.default_rng(8)
    wnids = [session.contract.classes[index].wnid for index in (1, 4, 5, 20)]
    for index in range(IMAGES):
        path = folder / wnids[index * 4 // IMAGES] / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (30 + index % 4 * 9, 33 + index % 3 * 13, 3), np.uint8)).save(path)
    (folder / wnids[1] / "030.png").write_bytes(b"no image")
    return folder


def looks(session: Model) -> Protocol:
    return make_protocol("dense-32", session.contract)


def info_of(session: Session, dataset: Dataset) -> RunInfo:
    return run_info(session, "m.onnx", describe_dataset(dataset), looks(session))


def opened(session: Session, data: Path) -> Dataset:
    return repeated(open_dataset(data, split="val", class_names=[c.wnid for c in session.contract.classes]), COPIES)


@pytest.fixture(scope="module")
def dataset(session: Session, data: Path) -> Dataset:
    return opened(session, data)


@pytest.fixture(scope="module")
def local(session: Session, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("runs") / "local"
    validated(session, dataset, looks(session), folder)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RESULT}


@pytest.fixture
def on_cluster(head: Head, session: Session, model: Path, dataset: Dataset, tmp_path: Path) -> Validate:
    """Validate on the cluster into tmp_path/run; give what was announced.

    hear: is told it too; after: is told the number of each chunk before the next is asked for.
    """

    def call(
        *,
        session: Model = session,
        model: Path = model,
        dataset: Dataset = dataset,
        hear: Callable[[str], object] = lambda _: None,
        after: Callable[[int], object] = lambda _: None,
    ) -> list[str]:
        said: list[str] = []

        def announce(text: str) -> None:
            said.append(text)
            hear(text)

        def elsewhere(chunks: Sequence[Sequence[Sample]]) -> Generator[ChunkResult, None, None]:
            info = info_of(session, dataset)
            evaluate = on_ray(Cluster(head.address, cpus=1), session, model, dataset, info, announce)
            with closing(evaluate(chunks)) as results:
                for number, result in enumerate(results):
                    yield result
                    after(number)

        validated(session, dataset, looks(session), tmp_path / "run", elsewhere=elsewhere, announce=announce)
        return said

    return call


def events(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "log.jsonl").read_text().splitlines()]


def waited_for(condition: Callable[[], object], seconds: float = 30) -> bool:
    """Say whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def lines_in(folder: Path) -> int:
    path = folder / "predictions.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_run_on_a_cluster_is_byte_for_byte_that_of_one_machine(
    on_cluster: Validate, tmp_path: Path, local: dict[str, bytes], capfd: pytest.CaptureFixture[str], head: Head
) -> None:
    said = on_cluster()
    assert contents(tmp_path / "run") == local
    joining = f"Ray: joining {head.address}"
    assert said == [f"{tmp_path / 'run'}: new", joining, f"Ray: {CPUS} workers of 1 CPUs"]
    assert capfd.readouterr().out == "", "stdout is for the result"
    assert events(tmp_path / "run") == ["start", *["chunk"] * CHUNKS]
    assert waited_for(lambda: not head.workers()), "workers outlive the run"


def test_killed_workers_are_replaced_and_each_image_is_counted_once(
    on_cluster: Validate, tmp_path: Path, local: dict[str, bytes], head: Head, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first dies when a chunk is written and six are not begun yet, the second as soon as that is noticed."""
    choices = random.Random(3)

    def kill_one() -> None:
        assert waited_for(head.workers)
        os.kill(choices.choice(head.workers()), signal.SIGKILL)

    def once_more(text: str) -> None:
        if "a worker was lost" in text:
            losses.append(text)
            if len(losses) == 1:
                kill_one()

    losses: list[str] = []
    on_cluster(hear=once_more, after=lambda number: number or kill_one())
    assert contents(tmp_path / "run") == local
    assert len(losses) == 2
    assert capfd.readouterr().out == "", "stdout is for the result"


def test_images_that_no_worker_survives_end_the_run_which_the_same_command_goes_on_with(
    on_cluster: Validate, tmp_path: Path, local: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluator.validation.cluster.Worker", Dying)
    with pytest.raises(EnvironmentFault) as caught:
        on_cluster()
    done = lines_in(tmp_path / "run")
    assert done % CHUNK == 0
    assert f"{ATTEMPTS} workers were lost with the images " in str(caught.value)
    assert f"{done} of {TOTAL} images are done and safe" in str(caught.value)
    monkeypatch.undo()
    said = on_cluster()
    assert done == 0 or f"{tmp_path / 'run'}: going on after {done} of {TOTAL} images" in said
    assert contents(tmp_path / "run") == local


def test_workers_that_cannot_be_started_are_not_started_for_ever(
    on_cluster: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluator.validation.cluster.Worker", Stillborn)
    with pytest.raises(EnvironmentFault, match=f"{ATTEMPTS * CPUS} workers in a row were lost at their start .* 0 of"):
        on_cluster()


def test_a_mistake_of_ours_on_a_worker_is_told_with_its_place(
    on_cluster: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluator.validation.cluster.Worker", Mistaken)
    with pytest.raises(ZeroDivisionError, match=r"ray_workers\.py"):
        on_cluster()


@pytest.fixture
def on_sigterm() -> Iterator[Any]:
    """Treat SIGTERM as the program does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_the_workers_and_keep_what_is_done(
    number: signal.Signals,
    on_cluster: Validate,
    tmp_path: Path,
    local: dict[str, bytes],
    head: Head,
    on_sigterm: Any,
) -> None:
    sender = threading.Thread(target=lambda: os.kill(os.getpid(), number))

    def send(chunk: int) -> None:
        if chunk == 1:
            sender.start()
        if chunk == CHUNKS - 2:
            sender.join()  # if this machine was so slow: never after the run

    with pytest.raises(Interrupted, match=rf"of {TOTAL} images are done\. The same command goes on"):
        on_cluster(after=send)
    assert lines_in(tmp_path / "run") >= 2 * CHUNK
    assert signal.getsignal(signal.SIGTERM) is on_sigterm
    assert waited_for(lambda: not head.workers()), "workers outlive the run"
    on_cluster()
    assert contents(tmp_path / "run") == local


def test_a_handler_of_sigterm_that_is_not_pythons_is_no_obstacle(
    on_cluster: Validate, tmp_path: Path, local: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, on_sigterm: Any
) -> None:
    monkeypatch.setattr("evaluator.validation.joining.signal.getsignal", lambda _: None)
    on_cluster()
    assert contents(tmp_path / "run") == local


def test_what_our_caller_prints_meanwhile_reaches_stdout(
    on_cluster: Validate, capsys: pytest.CaptureFixture[str]
) -> None:
    said = on_cluster(hear=print)
    assert capsys.readouterr().out.splitlines() == said


def test_an_image_that_is_gone_stops_the_run_with_its_name_and_the_machine(
    on_cluster: Validate, data: Path, session: Session, tmp_path: Path
) -> None:
    folder = shutil.copytree(data, tmp_path / "val")
    listed = opened(session, folder)
    gone = folder / listed.samples[5].file.partition("/")[2]
    gone.unlink()
    with pytest.raises(DatasetError, match=rf"^worker on {socket.gethostname()}: {gone}: it is gone"):
        on_cluster(dataset=listed)


def test_a_run_whose_driver_is_killed_at_random_moments_goes_on_and_ends_in_the_same_bytes(
    head: Head, model: Path, data: Path, tmp_path: Path, local: dict[str, bytes]
) -> None:
    moments, kills = random.Random(17), 0
    runs = (tmp_path / str(number) for number in count())
    folder = next(runs)
    with nursery() as children:
        order = {"data": data, "copies": COPIES, "model": model, "address": head.address}
        while kills < KILLS:
            code = children.live(moments.uniform(0, 2.5), folder=folder, **order)
            if code == 0:
                assert contents(folder) == local
                folder = next(runs)  # it was faster; the kills go on with another
            else:
                assert code == -signal.SIGKILL
                kills += 1
        assert waited_for(lambda: not head.workers()), "workers outlive their driver"
        children.begin(folder=folder, **order)
        assert children.end() == 0
    assert contents(folder) == local


# The worker alone, without Ray around it.


@pytest.fixture
def job(session: Session, model: Path, dataset: Dataset) -> Job:
    batches = {"batching": session.rules.to_json()}
    facts = {"model": {"sha256": session.model_sha256}, **session.circumstances.to_json(), **batches}
    image = dataset.samples[3]
    probes = [(image.file, hashlib.sha256(dataset.read(image)).hexdigest())]
    batching = Batching(CHUNK, session.rules)
    where = Placement("cpu", threads=1)
    return Job(Path.cwd(), model, where, replace(dataset, samples=()), looks(session), batching, facts, probes)


def test_a_worker_gives_of_a_chunk_what_the_driver_would_and_is_told_only_its_samples(
    job: Job, session: Session, dataset: Dataset
) -> None:
    worker = Worker(pickle.loads(pickle.dumps(job)))
    assert worker.start() == f"process {os.getpid()} on {socket.gethostname()}"
    chunk = dataset.samples[64:100]
    (expected,) = evaluate_chunks([session], dataset, looks(session), [chunk], CHUNK, 1)
    found = worker.evaluate(chunk)
    assert not isinstance(found, PreluNetError)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


def test_two_threads_of_a_worker_run_the_session_one_after_the_other(
    job: Job, session: Session, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run waits for a second one to come in, in vain."""
    meeting = threading.Barrier(2, timeout=0.3)
    met = []
    compute = session.compute

    def crowded(staged: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            met.append(meeting.wait())
        meeting.reset()
        return compute(staged)

    monkeypatch.setattr(session, "compute", crowded)
    monkeypatch.setattr("evaluator.validation.cluster.open_placed", lambda *_, **__: session)
    worker = Worker(job)
    assert isinstance(worker.start(), str)
    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(worker.evaluate, [dataset.samples[:1], dataset.samples[1:2]])]
    assert not any(isinstance(answer, PreluNetError) for answer in answers)
    assert met == []


def test_a_worker_without_the_model_file_says_so(job: Job) -> None:
    error = Worker(replace(job, model=Path("/nowhere/m.onnx"))).start()
    assert isinstance(error, UsageError)
    assert re.match(r"worker on .* cannot start: /nowhere/m\.onnx: .*\nEvery machine needs", str(error))


def test_a_worker_with_another_model_or_version_is_refused_with_the_difference(job: Job) -> None:
    versions = {**job.facts["versions"], "pillow": "1.0"}
    for facts, difference in [
        ({**job.facts, "versions": versions}, r"versions\.pillow: 1\.0 where the run was started, \d.* here"),
        ({**job.facts, "model": {"sha256": "ab" * 32}}, rf"model\.sha256: {'ab' * 32} where the run was started"),
        ({**job.facts, "provider": "CUDAExecutionProvider"}, "provider: CUDA.*, CPU.* here"),
    ]:
        error = Worker(replace(job, facts=facts)).start()
        assert isinstance(error, EnvironmentFault)
        assert re.search(difference, str(error))


def test_a_worker_with_other_images_is_refused(job: Job) -> None:
    other = replace(job.dataset, reader=OtherThere(job.dataset.reader, os.getpid() + 1))
    error = Worker(replace(job, dataset=other)).start()
    assert isinstance(error, DatasetError)
    assert re.search(r"worker on .* cannot start: .*\.png is another image here", str(error))


def test_scores_that_are_no_numbers_arrive_as_the_model_files_fault(
    job: Job, dataset: Dataset, model: Path, tmp_path: Path
) -> None:
    graph = onnx.load(model)
    (bias,) = [tensor for tensor in graph.graph.initializer if tensor.name == "fc3.bias"]
    bias.CopyFrom(numpy_helper.from_array(np.full(bias.dims, np.nan, np.float32), bias.name))
    broken = tmp_path / "broken.onnx"
    onnx.save(graph, broken)
    facts = {**job.facts, "model": {"sha256": sha256_of(broken)}}
    worker = Worker(replace(job, model=broken, facts=facts))
    assert isinstance(worker.start(), str)
    error = worker.evaluate(dataset.samples[:5])
    assert isinstance(error, ContractError)
    assert re.match(r"worker on .*\.png: .*no numbers", str(error))


# The driver alone, with a Ray whose answers come in the order that a test wants.


@dataclass
class ScriptedRay:
    """Stands for Ray's module: a test says which answers come next, and which of them tell that a worker is lost.

    order: of answers, the smallest comes first; lost: whether an answer is none; silences: how often none comes before
    each one.
    """

    order: Callable[["Owed"], Any] = lambda owed: owed.serial
    lost: Callable[["Owed"], bool] = lambda _: False
    silences: list[int] = field(default_factory=list)
    hired: list["ScriptedWorker"] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)  # chunks, each time that one is handed out
    serials: Iterator[int] = field(default_factory=count)

    class exceptions:  # noqa: N801 - as Ray names it
        RayError = KeyError
        RayTaskError = ZeroDivisionError

    def hire(self) -> "ScriptedWorker":
        self.hired.append(ScriptedWorker(self, len(self.hired)))
        return self.hired[-1]

    def wait(self, owed: list["Owed"], *, num_returns: int, timeout: float) -> tuple[list["Owed"], list["Owed"]]:
        assert (num_returns, timeout) == (1, PATIENCE)
        if self.silences:
            self.silences[0] -= 1
            if self.silences[0] >= 0:
                return [], owed
            self.silences.pop(0)
        return [min(owed, key=self.order)], []

    def get(self, answer: "Owed") -> Any:
        if self.lost(answer):
            answer.worker.alive = False
            raise KeyError("on purpose")
        return f"place {answer.worker.number}" if answer.chunk is None else ([answer.chunk], np.zeros((1, 2)))

    def kill(self, worker: "ScriptedWorker") -> None:
        worker.alive = False

    def crew(self, workers: int, chunks: int, said: list[str]) -> list[int]:
        """Return the chunks in the order in which they are yielded."""
        listed = [[Sample(f"{number}-first", 0, 1), Sample(f"{number}-last", 0, 1)] for number in range(chunks)]
        crew: Any = Crew(self, self.hire, workers, listed, said.append)  # type: ignore[arg-type]
        return [number for (number,), _ in crew.results()]


class ScriptedWorker:
    """Stands for an actor's handle."""

    def __init__(self, ray: ScriptedRay, number: int):
        self.ray, self.number, self.alive = ray, number, True
        self.start = SimpleNamespace(remote=lambda: self._owe(None))
        self.evaluate = SimpleNamespace(remote=self._begin)

    def _begin(self, samples: Sequence[Sample]) -> "Owed":
        chunk = int(samples[0].file.partition("-")[0])
        self.ray.begun.append(chunk)
        return self._owe(chunk)

    def _owe(self, chunk: int | None) -> "Owed":
        assert self.alive, "a lost worker is given something to do"
        return Owed(next(self.ray.serials), self, chunk)


@dataclass(frozen=True)
class Owed:
    """An answer of the so-manieth call; chunk: None of a start."""

    serial: int
    worker: ScriptedWorker
    chunk: int | None


def test_chunks_come_in_their_order_and_no_worker_runs_far_ahead_of_a_slow_one() -> None:
    # The first chunk is answered when nothing else is left to wait for.
    ray = ScriptedRay(order=lambda owed: (owed.chunk is not None, -(owed.chunk or 0)))
    listed: Any = [[Sample(f"{number}-first", 0, 1)] for number in range(40)]
    numbers: list[int] = []
    for lines, _ in Crew(ray, ray.hire, 3, listed, lambda _: None).results():  # type: ignore[arg-type]
        numbers.append(lines[0])  # type: ignore[arg-type]
        assert max(ray.begun) < numbers[-1] + AHEAD * 3
    assert numbers == list(range(40))
    assert sorted(ray.begun) == list(range(40))


@pytest.mark.parametrize("losses", [ATTEMPTS - 1, ATTEMPTS])
def test_a_chunk_is_given_up_with_the_third_worker_that_it_takes(losses: int) -> None:
    ray = ScriptedRay(lost=lambda owed: owed.chunk == 0 and ray.begun.count(0) <= losses)
    said: list[str] = []
    if losses < ATTEMPTS:
        assert ray.crew(1, 1, said) == [0]
    else:
        with pytest.raises(WorkersLost, match="3 workers were lost with the images 0-first to 0-last in hand"):
            ray.crew(1, 1, said)
    assert ray.begun == [0] * ATTEMPTS
    assert len(said) == ATTEMPTS - 1


@pytest.mark.parametrize("losses", [2 * ATTEMPTS - 1, 2 * ATTEMPTS])
def test_starts_are_given_up_with_the_third_loss_for_each_worker(losses: int) -> None:
    ray = ScriptedRay(lost=lambda owed: owed.worker.number < losses)
    if losses < 2 * ATTEMPTS:
        assert ray.crew(2, 9, []) == list(range(9))
    else:
        with pytest.raises(WorkersLost, match="6 workers in a row were lost at their start"):
            ray.crew(2, 9, [])
        assert len(ray.hired) == 2 + losses - 1


def test_starts_that_fail_now_and_then_do_not_add_up_to_an_end() -> None:
    """Of every three workers one starts, does a chunk and is lost with the next: a long run on a shaky cluster."""

    def lost(owed: Owed) -> bool:
        return owed.worker.number % 3 < 2 if owed.chunk is None else ray.begun.count(owed.chunk) < 2

    ray = ScriptedRay(lost=lost)
    assert ray.crew(1, 20, []) == list(range(20))
    assert len(ray.hired) > 20


def test_a_worker_that_is_lost_while_it_could_take_more_is_given_nothing() -> None:
    """The first chunk is lost when it is all that is left to wait for: beyond AHEAD nothing was begun."""
    ray = ScriptedRay(
        order=lambda owed: (owed.chunk == 0, owed.serial),
        lost=lambda owed: owed.chunk == 0 and ray.begun.count(0) == 1,
    )
    assert ray.crew(1, 2 * AHEAD, []) == list(range(2 * AHEAD))
    assert ray.begun[: AHEAD + 1] == [*range(AHEAD), 0], "the lost worker has no room left, and the test shows nothing"
    assert [worker.alive for worker in ray.hired] == [False, True]


def test_after_a_silence_it_is_said_which_images_and_which_worker_are_waited_for() -> None:
    ray = ScriptedRay(silences=[1, 5, 0, 1])  # before the starts of both workers, the first chunk, the second
    said: list[str] = []
    assert ray.crew(2, 9, said) == list(range(9))
    assert said[0] == "Ray: the cluster has no room for a worker yet; waiting"
    expected = [(30, 0), (60, 0), (120, 0), (30, 1)]  # after 1, 2, 4 times PATIENCE, and anew after an answer
    for text, (seconds, chunk) in zip(said[1:], expected, strict=True):
        images = f"the images {chunk}-first to {chunk}-last from place 0."
        assert text.startswith(f"Ray: no answer for {seconds} s; waiting for {images}")


# What is asked of the cluster.


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
def test_as_many_workers_are_asked_for_as_the_machines_have_room_for(
    machines: list[dict[str, float]], cpus: int, gpu: bool, expected: tuple[int, int]
) -> None:
    assert room(machines, cpus, gpu=gpu) == expected


@pytest.mark.parametrize(("machines", "cpus", "gpu"), [([{"CPU": 2.0}], 3, False), ([{"CPU": 8.0}], 0, True)])
def test_a_cluster_without_room_for_a_worker_is_told_so(machines: list[dict[str, float]], cpus: int, gpu: bool) -> None:
    with pytest.raises(EnvironmentFault, match=r"none of the cluster's 1 machines has .* CPUs"):
        room(machines, cpus, gpu=gpu)


def evaluated_on(address: str, session: Session, model: Path, dataset: Dataset) -> None:
    evaluate = on_ray(Cluster(address), session, model, dataset, info_of(session, dataset))
    next(evaluate([dataset.samples[:1]]))


def test_without_ray_it_is_said_how_to_bring_it(
    session: Session, model: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFault, match=r"ray cannot be imported .*pip install '\.\[ray\]'"):
        evaluated_on("local", session, model, dataset)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1"])
def test_an_address_where_nobody_listens_is_told_with_what_to_give(
    session: Session, model: Path, dataset: Dataset, address: str
) -> None:
    with pytest.raises(EnvironmentFault, match=rf"--ray {re.escape(address)}: no cluster could be joined .*HOST:PORT"):
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
def test_what_is_no_address_is_refused_with_what_to_give(address: str) -> None:
    with pytest.raises(UsageError, match=r"--ray '.*': no address .* HOST:PORT .* auto .* local"):
        Cluster(address)


@pytest.mark.parametrize("address", ["auto", "local", "head:6379", "a-b.c_d:1", "10.0.0.1:65535", "[fe80::1]:6379"])
def test_an_address_is_taken_as_it_is_given(address: str) -> None:
    assert Cluster(address).address == address


def test_what_is_no_address_is_refused_before_a_run_folder_is_made(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    order = ["--model", model, "--data", data, "--run", folder, "--ray", "127.0.0.1"]
    assert run(["validate", *map(str, order)]) == 2
    assert "HOST:PORT" in capsys.readouterr().err
    assert not folder.exists()


# The start, with a Ray whose `init` does what a test wants, as Ray does it: after setting its own handler of SIGTERM.


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch, on_sigterm: Any) -> Iterator[Callable[[Callable[[], object]], list[str]]]:
    """Start Ray whose `init` does something; give what was announced before. Afterwards the handlers are ours."""
    before = signal.getsignal(signal.SIGALRM)
    ends: list[str] = []

    def start(init: Callable[[], object]) -> list[str]:
        said: list[str] = []

        def init_of_ray(**_options: object) -> None:
            signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(number))
            assert said, "nothing is said before it may hang"
            init()

        fake = SimpleNamespace(init=init_of_ray, shutdown=lambda: ends.append("shutdown"))
        monkeypatch.setitem(sys.modules, "ray", fake)
        with connected("local", said.append):
            pass
        return said

    yield start
    assert ends == ["shutdown"], "what Ray had started lives on"
    assert signal.getsignal(signal.SIGTERM) is on_sigterm
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.alarm(0) == 0, "an alarm goes off in what comes after"


def test_before_ray_starts_it_is_said(starting: Any) -> None:
    assert starting(lambda: None) == ["Ray: starting a cluster on this machine"]


def fail() -> None:
    raise Exception("The current node timed out during startup.")


def test_a_start_that_fails_with_a_bare_exception_is_a_fault_of_the_machine_with_its_mend(starting: Any) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"--ray local: .*\(The current node timed out .*\).* try again; .*/tmp/ray"
    ):
        starting(fail)


def test_sigterm_while_ray_starts_is_an_interruption(starting: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        starting(lambda: os.kill(os.getpid(), signal.SIGTERM))


def test_sigterm_while_ray_starts_keeps_what_is_done_and_says_how_to_go_on(
    starting: Any, session: Session, model: Path, dataset: Dataset, tmp_path: Path
) -> None:
    def elsewhere(_chunks: Sequence[Sequence[Sample]]) -> Generator[ChunkResult, None, None]:
        starting(lambda: os.kill(os.getpid(), signal.SIGTERM))
        yield from ()

    with pytest.raises(Interrupted, match=rf"0 of {TOTAL} images are done\. The same command goes on"):
        validated(session, dataset, looks(session), tmp_path / "run", elsewhere=elsewhere)


def try_for_ever() -> None:
    """Hang as Ray does, for which each Exception is a reason to try again."""
    while True:
        with suppress(Exception):
            time.sleep(60)


def test_a_start_that_hangs_is_given_up(starting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluator.validation.joining.JOINING", 1)
    with pytest.raises(EnvironmentFault, match=r"--ray local: no cluster could be joined \(no answer for 1 s\)"):
        starting(try_for_ever)


def test_outside_the_main_thread_ray_starts_without_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(init=lambda **_: None, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", fake)

    def connect() -> object:
        with connected("local", lambda _: None) as ray:
            return ray

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(connect).result() is fake
