"""Validation on a Ray cluster writes the same bytes as one machine, even if workers or the driver are lost."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import DatasetError, EnvironmentFault, Interrupted
from prelunet.evaluator.validation.pipeline import ChunkResult
from prelunet.evaluator.validation.ray_cluster import Cluster, evaluate_on_ray
from prelunet.evaluator.validation.run import CHUNK
from prelunet.evaluator.validation.validate import WorkersLost
from tests.helpers.child_processes import fork_server
from tests.helpers.fakes import validated
from tests.validation.ray.cluster_data import CHUNKS, COPIES, TOTAL, cluster_protocol, info_of, opened
from tests.validation.ray.ray_workers import DEATHS, buggy_group, crashing_group, mortal_group
from tests.validation.shared_data import contents

Validate = Callable[..., list[str]]
CPUS = 2
ATTEMPTS = 2  # of a task, where workers die: each takes seconds to start
GROUP_FUNCTION = "prelunet.evaluator.validation.ray_cluster.evaluate_group"

HEAD = """
import os, sys
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
context = ray.init("local", num_cpus=int(sys.argv[1]), include_dashboard=False, log_to_driver=False)
print("address", context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class RayHead:
    """A Ray cluster of two CPUs on this machine."""

    process: "subprocess.Popen[str]"
    address: str

    def workers(self) -> list[int]:
        """Return the process ids of the workers on this cluster that have opened a session."""
        return [pid for pid in descendants(self.process.pid) if has_opened_a_session(pid)]


def descendants(pid: int) -> list[int]:
    """Return the process ids of the descendants of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def has_opened_a_session(pid: int) -> bool:
    """Return whether a process has loaded a runtime. Idle processes of Ray, which wait for other jobs, have not."""
    try:
        return "onnxruntime" in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    """Start a cluster."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
        )  # for the workers
        with started() as head:
            yield head


@contextmanager
def started() -> Iterator[RayHead]:
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
        yield RayHead(process, said[-1].split()[1])
        process.communicate("")


@pytest.fixture(scope="module")
def local(session: Session, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("runs") / "local"
    validated(session, dataset, cluster_protocol(session), folder)
    return contents(folder)


@pytest.fixture
def on_cluster(head: RayHead, session: Session, model: Path, dataset: Dataset, tmp_path: Path) -> Validate:
    """Validate on the cluster into tmp_path/run; return the reported messages.

    cpus: of each worker; the default leaves room for one, as each takes seconds to start. on_report: also receives each
    message; after: called with the number of each chunk before the next is requested.
    """

    def call(
        *,
        session: Session = session,
        model: Path = model,
        dataset: Dataset = dataset,
        cpus: int = CPUS,
        on_report: Callable[[str], object] = lambda _: None,
        after: Callable[[int], object] = lambda _: None,
    ) -> list[str]:
        said: list[str] = []

        def report(text: str) -> None:
            said.append(text)
            on_report(text)

        def chunk_evaluator(chunks: Sequence[Sequence[Sample]]) -> Generator[ChunkResult, None, None]:
            info = info_of(session, dataset)
            evaluate = evaluate_on_ray(Cluster(head.address, cpus=cpus), session, model, dataset, info, report)
            with closing(evaluate(chunks)) as results:
                for number, result in enumerate(results):
                    yield result
                    after(number)

        validated(
            session,
            dataset,
            cluster_protocol(session),
            tmp_path / "run",
            chunk_evaluator=chunk_evaluator,
            report=report,
        )
        return said

    return call


def events(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "log.jsonl").read_text().splitlines()]


def waited_for(condition: Callable[[], object], seconds: float = 30) -> bool:
    """Return whether a condition became true before the timeout."""
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
    on_cluster: Validate, tmp_path: Path, local: dict[str, bytes], capfd: pytest.CaptureFixture[str], head: RayHead
) -> None:
    said = on_cluster(cpus=1)
    assert contents(tmp_path / "run") == local
    joining = f"Ray: joining {head.address}"
    assert said == [f"{tmp_path / 'run'}: new", joining, f"Ray: {CPUS} workers of 1 CPUs"]
    assert capfd.readouterr().out == "", "stdout is for the result"
    assert events(tmp_path / "run") == ["start", *["chunk"] * CHUNKS]
    assert waited_for(lambda: not head.workers()), "workers outlive the run"


def test_killed_workers_are_replaced_and_each_image_is_counted_once(
    on_cluster: Validate,
    tmp_path: Path,
    local: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(GROUP_FUNCTION, mortal_group)
    on_cluster(cpus=1)
    assert contents(tmp_path / "run") == local
    assert len((tmp_path / DEATHS).read_text().splitlines()) >= 2
    assert capfd.readouterr().out == "", "stdout is for the result"


def resumed_here(session: Session, dataset: Dataset, folder: Path) -> list[str]:
    """Resume the run of a cluster on this machine, where no worker has to start; return the reported messages."""
    said: list[str] = []
    validated(session, dataset, cluster_protocol(session), folder, report=said.append)
    return said


def test_images_that_no_worker_survives_end_the_run_which_can_be_resumed(
    on_cluster: Validate,
    tmp_path: Path,
    local: dict[str, bytes],
    session: Session,
    dataset: Dataset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GROUP_FUNCTION, crashing_group)
    monkeypatch.setattr("prelunet.evaluator.validation.ray_cluster.MAX_ATTEMPTS", ATTEMPTS)
    with pytest.raises(EnvironmentFault) as caught:
        on_cluster()
    done = lines_in(tmp_path / "run")
    assert done % CHUNK == 0
    assert f"{ATTEMPTS} workers were lost while evaluating images " in str(caught.value)
    assert f"{done} of {TOTAL} images are done and saved" in str(caught.value)
    said = resumed_here(session, dataset, tmp_path / "run")
    assert done == 0 or f"{tmp_path / 'run'}: resuming after {done} of {TOTAL} images" in said
    assert contents(tmp_path / "run") == local


def test_workers_killed_for_lack_of_memory_are_not_replaced_for_ever(
    head: RayHead, session: Session, model: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    with started() as full:
        evaluate = evaluate_on_ray(Cluster(full.address, cpus=CPUS), session, model, dataset, info_of(session, dataset))
        lost = pytest.raises(WorkersLost, match=r"3 workers were lost .* running low on memory")
        with closing(evaluate([dataset.samples])) as results, lost:
            next(results)


def test_a_bug_in_a_worker_is_raised_with_its_traceback(on_cluster: Validate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GROUP_FUNCTION, buggy_group)
    with pytest.raises(ZeroDivisionError, match=r"ray_workers\.py"):
        on_cluster()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_the_workers_and_keep_what_is_done(  # noqa: PLR0917
    number: signal.Signals,
    on_cluster: Validate,
    tmp_path: Path,
    local: dict[str, bytes],
    session: Session,
    dataset: Dataset,
    head: RayHead,
    on_sigterm: Any,
) -> None:
    sender = threading.Thread(target=lambda: os.kill(os.getpid(), number))

    def send(chunk: int) -> None:
        if chunk == 1:
            assert head.workers()
            sender.start()
        if chunk == CHUNKS - 2:
            sender.join()  # on a slow machine; the signal must never arrive after the run

    with pytest.raises(Interrupted, match=rf"of {TOTAL} images are done\. Repeat the same command or call"):
        on_cluster(after=send)
    assert lines_in(tmp_path / "run") >= 2 * CHUNK
    assert signal.getsignal(signal.SIGTERM) is on_sigterm
    assert waited_for(lambda: not head.workers()), "workers outlive the run"
    resumed_here(session, dataset, tmp_path / "run")
    assert contents(tmp_path / "run") == local


def test_a_missing_image_stops_the_run_with_its_name_and_the_machine(
    on_cluster: Validate, data: Path, session: Session, tmp_path: Path
) -> None:
    folder = shutil.copytree(data, tmp_path / "val")
    listed = opened(session, folder)
    gone = folder / listed.samples[5].file.partition("/")[2]
    gone.unlink()
    with pytest.raises(DatasetError, match=rf"^worker on {socket.gethostname()}: {gone}: no longer exists"):
        on_cluster(dataset=listed)


def test_a_run_whose_driver_is_killed_at_a_random_moment_resumes_and_ends_in_the_same_bytes(
    head: RayHead, model: Path, data: Path, tmp_path: Path, local: dict[str, bytes]
) -> None:
    moments, code = random.Random(17), 0
    runs = (tmp_path / str(number) for number in count())
    folder = next(runs)
    with fork_server() as children:
        order = {"data": data, "copies": COPIES, "model": model, "address": head.address}
        while code == 0:
            code = children.kill_after(moments.uniform(0, 2.5), folder=folder, **order)
            if code == 0:
                assert contents(folder) == local
                folder = next(runs)  # it was faster; the kills go on with another
        assert code == -signal.SIGKILL
        assert waited_for(lambda: not head.workers()), "workers outlive their driver"
        children.begin(folder=folder, **order)
        assert children.end() == 0
    assert contents(folder) == local
