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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from evaluator.datasets.opening import open_dataset
from evaluator.datasets.sample import Dataset
from evaluator.engine.classify import Model
from evaluator.engine.session import Session, open_session
from evaluator.errors import ContractError, DatasetError, EnvironmentFault, Interrupted, PreluNetError, UsageError
from evaluator.files import sha256_of
from evaluator.protocols import Protocol, make_protocol
from evaluator.validation.cluster import AHEAD, ATTEMPTS, Cluster, Crew, Job, Worker, on_ray, room
from evaluator.validation.run import CHUNK
from evaluator.validation.validate import evaluate_chunks
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
    """Validate on the cluster into tmp_path/run; give what was announced."""

    def call(
        *, session: Model = session, model: Path = model, dataset: Dataset = dataset, said: list[str] | None = None
    ) -> list[str]:
        said = [] if said is None else said
        elsewhere = on_ray(Cluster(head.address, cpus=1), session, model, dataset, looks(session), said.append)
        validated(session, dataset, looks(session), tmp_path / "run", elsewhere=elsewhere, announce=said.append)
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


@contextmanager
def meanwhile(happens: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Do something in another thread as soon as a condition is true, while the block runs."""
    done = []

    def watch() -> None:
        assert waited_for(happens)
        act()
        done.append(True)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()
    assert done, "it never happened"


def test_a_run_on_a_cluster_is_byte_for_byte_that_of_one_machine(
    on_cluster: Validate, tmp_path: Path, local: dict[str, bytes], capfd: pytest.CaptureFixture[str], head: Head
) -> None:
    said = on_cluster()
    assert contents(tmp_path / "run") == local
    assert said == [f"{tmp_path / 'run'}: new", f"Ray: {CPUS} workers of 1 CPUs"]
    assert capfd.readouterr().out == "", "stdout is for the result"
    assert events(tmp_path / "run") == ["start", *["chunk"] * CHUNKS]
    assert waited_for(lambda: not head.workers()), "workers outlive the run"


def test_killed_workers_are_replaced_and_each_image_is_counted_once(
    on_cluster: Validate, tmp_path: Path, local: dict[str, bytes], head: Head, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    moments = random.Random(3)

    def kill_two() -> None:
        for begun in (1, 5):
            assert waited_for(lambda begun=begun: lines_in(tmp_path / "run") >= begun * CHUNK)
            time.sleep(moments.uniform(0, 0.1))
            os.kill(moments.choice(head.workers()), signal.SIGKILL)

    with meanwhile(lambda: True, kill_two):
        on_cluster(said=said)
    assert contents(tmp_path / "run") == local
    assert sum("a worker was lost" in line for line in said) == 2
    assert capfd.readouterr().out == ""


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


def test_ctrl_c_ends_the_workers_and_keeps_what_is_done(
    on_cluster: Validate, tmp_path: Path, local: dict[str, bytes], head: Head
) -> None:
    with (
        meanwhile(lambda: lines_in(tmp_path / "run") >= 2 * CHUNK, lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(Interrupted, match=rf"of {TOTAL} images are done\. The same command goes on"),
    ):
        on_cluster()
    assert waited_for(lambda: not head.workers()), "workers outlive the run"
    on_cluster()
    assert contents(tmp_path / "run") == local


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
    facts = {"model": {"sha256": session.model_sha256}, **session.circumstances.to_json()}
    image = dataset.samples[3]
    probes = [(image.file, hashlib.sha256(dataset.read(image)).hexdigest())]
    return Job(Path.cwd(), model, "cpu", 1, replace(dataset, samples=()), looks(session), facts, probes)


def test_a_worker_gives_of_a_chunk_what_the_driver_would_and_is_told_only_its_samples(
    job: Job, session: Session, dataset: Dataset
) -> None:
    worker = Worker(pickle.loads(pickle.dumps(job)))
    assert worker.start() is None
    chunk = dataset.samples[64:100]
    (expected,) = evaluate_chunks(session, dataset, looks(session), [chunk], 1)
    found = worker.evaluate(chunk)
    assert not isinstance(found, PreluNetError)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


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
    assert worker.start() is None
    error = worker.evaluate(dataset.samples[:5])
    assert isinstance(error, ContractError)
    assert re.match(r"worker on .*\.png: .*no numbers", str(error))


# The driver alone, with a Ray whose answers come in the order that a test wants.


class Answers:
    """Stands for Ray's module: the first chunk is answered when nothing else is left to wait for."""

    class exceptions:  # noqa: N801 - as Ray names it
        RayError = KeyError
        RayTaskError = ZeroDivisionError

    def wait(self, owed: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        last = max(owed, key=lambda ref: (ref[0] == "start", ref[1]))
        return [last], []

    def get(self, ref: Any) -> Any:
        kind, number = ref
        return None if kind == "start" else ([number], np.zeros((1, 2), np.float32))


def test_chunks_come_in_their_order_and_no_worker_runs_far_ahead_of_a_slow_one() -> None:
    begun: list[int] = []
    starts = count()

    def begin(chunk: list[int]) -> tuple[str, int]:
        begun.append(chunk[0])
        return "chunk", chunk[0]

    def hire() -> Any:
        start = SimpleNamespace(remote=lambda: ("start", next(starts)))
        return SimpleNamespace(start=start, evaluate=SimpleNamespace(remote=begin))

    chunks: Any = [[number] for number in range(40)]
    numbers = []
    for lines, _ in Crew(Answers(), hire, 3, chunks, lambda _: None).results():  # type: ignore[arg-type]
        numbers.append(lines[0])
        assert max(begun) < numbers[-1] + AHEAD * 3
    assert numbers == list(range(40))
    assert sorted(begun) == list(range(40))


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
    evaluate = on_ray(Cluster(address), session, model, dataset, looks(session))
    next(evaluate([dataset.samples[:1]]))


def test_without_ray_it_is_said_how_to_bring_it(
    session: Session, model: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFault, match=r"ray cannot be imported .*pip install '\.\[ray\]'"):
        evaluated_on("local", session, model, dataset)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "no-address", "127.0.0.1:port"])
def test_an_address_where_nobody_listens_is_told_with_what_to_give(
    session: Session, model: Path, dataset: Dataset, address: str
) -> None:
    with pytest.raises(EnvironmentFault, match=rf"--ray {re.escape(address)}: no cluster could be joined .*HOST:PORT"):
        evaluated_on(address, session, model, dataset)
