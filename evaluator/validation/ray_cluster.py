"""Evaluate on the machines of a Ray cluster: an adapter between `validate` and Ray's actors.

The driver distributes chunks. Only the driver writes the run folder, chunk by chunk and in order, so the run equals
that of a single machine. A worker opens the model file and the dataset by their paths, and must verify that they match
the driver's before it receives chunks. The chunks of a lost worker are distributed again, and late answers from it are
ignored, so that each image counts once.
"""

import hashlib
import heapq
import io
import logging
import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from ..datasets.dataset import Dataset, Sample
from ..engine.load import open_with_placement
from ..engine.session import Placement, Session
from ..errors import DatasetError, EnvironmentFault, PreluNetError, UsageError, install_hint
from ..imaging.decode import silence_decoders
from ..json_checks import differences, format_differences
from ..protocols import EvaluationProtocol
from .pipeline import ChunkResult, evaluate_chunks
from .run import Batching, RunInfo
from .validate import ChunkEvaluator, WorkersLost

MAX_CHUNKS_IN_FLIGHT = 2  # per worker: the session computes one while threads decode the other
MAX_CHUNKS_AHEAD = 4  # per worker: chunks that may be started before the oldest one is finished and written
MAX_ATTEMPTS = 3  # per chunk, and per worker start
DEFAULT_CPUS = 4  # per worker, if none are requested and the machines have as many
PROBE_IMAGES = 8  # images that must be identical on the worker and the driver
STALL_SECONDS = 30.0  # seconds without an answer before a message says what is pending


@dataclass(frozen=True)
class Cluster:
    """The cluster that evaluates a run.

    address: of a Ray cluster (HOST:PORT), `auto` for the one this machine belongs to, `local` to start one for this
    run; workers: number of workers, 0 for as many as fit; cpus: CPUs and threads per worker, 0 for four, or for all
    CPUs of a smaller machine.
    Raises UsageError for any other address.
    """

    address: str
    workers: int = 0
    cpus: int = 0

    def __post_init__(self) -> None:
        """Refuse addresses that Ray would misinterpret, or reject only after a timeout."""
        if self.address not in {"auto", "local"}:
            host_and_port(self.address)


@dataclass(frozen=True)
class Job:
    """Sent to each worker once. dataset: without its samples, which come with the chunks."""

    folder: Path  # the driver's working directory, to which paths are relative
    model: Path
    placement: Placement
    dataset: Dataset
    protocol: EvaluationProtocol
    batching: Batching
    facts: Mapping[str, Any]  # of the driver's session, which must equal the worker's
    probes: Sequence[tuple[str, str]]  # names of images and the sha256 of their bytes


def evaluate_on_ray(
    cluster: Cluster,
    session: Session,
    model: Path,
    dataset: Dataset,
    info: RunInfo,
    report: Callable[[str], None] = lambda _message: None,
) -> ChunkEvaluator:
    """Return a function for `validate` that evaluates chunks on a Ray cluster. Nothing starts before it is called.

    session, model: the driver's own session and its file; info: of the run; report: receives a message about the
    workers, and one for each lost worker.
    The function raises EnvironmentFault when Ray is missing, unreachable or has no room for a worker, or when a worker
    differs from the driver (the error shows the difference). It raises WorkersLost when workers are lost repeatedly,
    and each PreluNetError of a worker, with the name of its machine.
    """

    def evaluate(chunks: Sequence[Sequence[Sample]]) -> Generator[ChunkResult, None, None]:
        gpu = session.circumstances.on_gpu
        with ray_connection(cluster.address, report) as ray:
            cpus, max_workers = worker_capacity(
                [node["Resources"] for node in ray.nodes() if node["Alive"]], cluster.cpus, gpu=gpu
            )
            count = min(cluster.workers or max_workers, len(chunks))
            report(f"Ray: {count} workers of {cpus} CPUs{' and a GPU' * gpu}")
            shared = replace(dataset, samples=())
            numbers = sorted({len(chunks) * probe // PROBE_IMAGES for probe in range(PROBE_IMAGES)})  # spread evenly
            probes = [(file, _digest(shared, file)) for file in (chunks[number][-1].file for number in numbers)]
            assert info.batching is not None, "None only for ensembles"
            placement = replace(session.placement, threads=cpus)
            job = Job(Path.cwd(), model, placement, shared, info.protocol, info.batching, _facts(session), probes)
            job_ref = ray.put(job)
            actor = ray.remote(num_cpus=cpus, num_gpus=int(gpu), max_concurrency=MAX_CHUNKS_IN_FLIGHT)(Worker)
            yield from WorkerPool(ray, lambda: actor.remote(job_ref), count, chunks, report).results()

    return evaluate


def _facts(session: Session) -> dict[str, Any]:
    batching = {"batching": session.rules.to_json()}
    return {"model": {"sha256": session.model_sha256}, **session.circumstances.to_json(), **batching}


def _digest(dataset: Dataset, file: str) -> str:
    return hashlib.sha256(dataset.reader.read(file)).hexdigest()


def worker_capacity(machines: Sequence[Mapping[str, float]], cpus: int, *, gpu: bool) -> tuple[int, int]:
    """Return the CPUs per worker and the number of workers that fit.

    machines: resources of each, by Ray's names; cpus: requested, see `Cluster`; gpu: whether each worker needs one.
    """
    usable = [(int(machine.get("CPU", 0)), int(machine.get("GPU", 0))) for machine in machines]
    usable = [machine for machine in usable if machine[0] and machine[1] >= gpu]
    cpus = cpus or min([DEFAULT_CPUS, *(machine[0] for machine in usable)])
    workers = sum(min(machine[0] // cpus, machine[1]) if gpu else machine[0] // cpus for machine in usable)
    if not workers:
        raise EnvironmentFault(
            f"--ray: none of the cluster's {len(machines)} machines has {cpus} CPUs{' and a GPU' * gpu} for a worker. "
            "Request fewer with --threads, or add machines"
        )
    return cpus, workers


class Worker:
    """A Ray actor on a machine of the cluster, with MAX_CHUNKS_IN_FLIGHT threads.

    Each PreluNetError is returned, because Ray would wrap a raised one.
    """

    def __init__(self, job: Job):
        self._job = job
        self._session: Session | None = None

    def start(self) -> str | PreluNetError:
        """Open the model and check that this machine matches the driver. Return a description of this worker."""
        job = self._job
        silence_decoders()
        try:
            if job.folder.is_dir():
                os.chdir(job.folder)
            session = open_with_placement(job.model, job.placement, preallocate=True)
            found = differences(job.facts, _facts(session), places=("on the driver", "on this worker"))
            if found:
                raise EnvironmentFault(f"differs from the driver:\n{format_differences(found)}")
            if changed := [file for file, digest in job.probes if _digest(job.dataset, file) != digest]:
                raise DatasetError(f"{job.dataset.location}: {changed[0]} differs from the driver's image")
        except PreluNetError as error:
            fix = "Every machine needs the same versions, and the same model and images at the same paths"
            return type(error)(f"worker on {socket.gethostname()} cannot start: {error}\n{fix}")
        self._session = session
        return f"process {os.getpid()} on {socket.gethostname()}"

    def evaluate(self, chunk: Sequence[Sample]) -> ChunkResult | PreluNetError:
        """Evaluate one chunk. Called after `start`, from several threads."""
        assert self._session is not None, "start() comes first"
        job = self._job
        try:
            size, threads = job.batching.images_together, job.placement.threads
            (result,) = evaluate_chunks([self._session], job.dataset, job.protocol, [chunk], size, threads)
        except PreluNetError as error:
            return type(error)(f"worker on {socket.gethostname()}: {error}")
        return result


class WorkerPool:
    """The workers of one evaluation and their chunks in flight.

    ray: the module; start_actor: starts one more worker; count: number of workers.
    """

    def __init__(
        self,
        ray: ModuleType,
        start_actor: Callable[[], Any],
        count: int,
        chunks: Sequence[Sequence[Sample]],
        report: Callable[[str], None],
    ):
        self._ray, self._start_actor, self._count, self._chunks, self._report = ray, start_actor, count, chunks, report
        self._todo = list(range(len(chunks)))  # a heap of chunk numbers
        self._pending: dict[Any, tuple[Any, int | None]] = {}  # answer → worker and its chunk, or None for its start
        self._idle: list[Any] = []  # workers, once per free slot
        self._losses: Counter[int | None] = Counter()  # chunk, or None for a start → number of workers lost with it
        self._places: dict[Any, str] = {}  # started worker → its description
        self._stalls = 0  # consecutive waits of STALL_SECONDS without an answer
        for _ in range(count):
            self._start_worker()

    def results(self) -> Iterator[ChunkResult]:
        """Yield the result of each chunk, in order."""
        finished: dict[int, ChunkResult] = {}
        for number in range(len(self._chunks)):
            while number not in finished:
                self._hand_out(number + MAX_CHUNKS_AHEAD * self._count)
                finished.update(self._next_answer())
            yield finished.pop(number)

    def _start_worker(self) -> None:
        worker = self._start_actor()
        self._pending[worker.start.remote()] = worker, None

    def _hand_out(self, end: int) -> None:
        """Assign chunks below `end` to workers with a free slot."""
        while self._idle and self._todo and self._todo[0] < end:
            number, worker = heapq.heappop(self._todo), self._idle.pop(0)
            self._pending[worker.evaluate.remote(self._chunks[number])] = worker, number

    def _next_answer(self) -> dict[int, ChunkResult]:
        """Wait for an answer. Return it by its chunk's number, or nothing if it is not a result."""
        answers, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=STALL_SECONDS)
        if not answers:
            self._report_stall()
            return {}
        self._stalls = 0
        worker, number = self._pending.pop(answers[0])
        try:
            answer = self._ray.get(answers[0])
        except self._ray.exceptions.RayTaskError:
            raise  # a bug; it includes the worker's traceback
        except self._ray.exceptions.RayError as error:
            self._replace_worker(worker, number, error_line(error))
            return {}
        if isinstance(answer, PreluNetError):
            raise answer
        if number is not None:
            self._idle.append(worker)
            return {number: answer}
        self._places[worker] = answer
        self._idle += [worker] * MAX_CHUNKS_IN_FLIGHT
        self._losses[None] = 0
        return {}

    def _report_stall(self) -> None:
        """Report what is pending after 1, 2, 4, ... times STALL_SECONDS. The worker may be slow, or may hang."""
        self._stalls += 1
        if self._stalls & (self._stalls - 1):
            return
        waiting = [(number, worker) for worker, number in self._pending.values() if number is not None]
        if not waiting:
            self._report("Ray: the cluster has no room for a worker yet; waiting")
            return
        number, worker = min(waiting, key=lambda pending: pending[0])
        self._report(
            f"Ray: no answer for {self._stalls * STALL_SECONDS:.0f} s; waiting for images {self._images_of(number)} "
            f"from {self._places[worker]}. If it hangs, kill that process; another worker will repeat its work"
        )

    def _images_of(self, chunk: int) -> str:
        return f"{self._chunks[chunk][0].file} to {self._chunks[chunk][-1].file}"

    def _replace_worker(self, worker: Any, number: int | None, reason: str) -> None:
        """Requeue the chunks of a lost worker and start a new one."""
        in_flight = {number, *(other for owner, other in self._pending.values() if owner is worker)}
        self._pending = {answer: pending for answer, pending in self._pending.items() if pending[0] is not worker}
        self._idle = [other for other in self._idle if other is not worker]
        self._places.pop(worker, None)
        self._ray.kill(worker)  # it may still run, but be unreachable
        self._losses.update(in_flight)
        for chunk in [chunk for chunk in in_flight if chunk is not None]:
            heapq.heappush(self._todo, chunk)
            if self._losses[chunk] >= MAX_ATTEMPTS:
                place = self._images_of(chunk)
                raise WorkersLost(f"{MAX_ATTEMPTS} workers were lost while evaluating images {place} ({reason})")
        if self._losses[None] >= MAX_ATTEMPTS * self._count:
            raise WorkersLost(f"{self._losses[None]} workers in a row were lost while starting ({reason})")
        self._report(f"Ray: a worker was lost ({reason}); another one repeats its work")
        self._start_worker()


# Join or start a Ray cluster. Ray is imported on demand; the extra `ray` installs it.


JOIN_TIMEOUT = 120  # seconds to wait for a cluster that does not answer


def host_and_port(address: str) -> tuple[str, int]:
    """Parse HOST:PORT, with IPv6 hosts in brackets."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):([0-9]{1,5})", address)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise UsageError(
            f"--ray {address!r}: not the address of a cluster. Pass HOST:PORT of its head node, such as head:6379, "
            "auto for the cluster that this machine belongs to, or local to start one here"
        )
    return found[1].strip("[]"), int(found[2])


@contextmanager
def ray_connection(address: str, report: Callable[[str], None]) -> Iterator[ModuleType]:
    """Connect to a cluster and yield Ray's module. On exit, the workers end, and so does a local cluster.

    Meanwhile nothing is written to stdout, which carries our result: Ray prints messages about workers there, and has
    no option to disable that. Its usage statistics are disabled unless RAY_USAGE_STATS_ENABLED is 1. Its SIGTERM
    handler, which exits silently, is replaced by the previous one.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # avoids a deprecation warning
    try:
        import ray
    except ImportError as error:
        raise EnvironmentFault(f"--ray: ray cannot be imported ({error}). Install it: {install_hint('ray')}") from error
    report("Ray: starting a cluster on this machine" if address == "local" else f"Ray: joining {address}")
    with redirect_stdout(io.StringIO()):
        try:
            _join(ray, address)
            yield ray
        finally:
            ray.shutdown()


def _join(ray: ModuleType, address: str) -> None:
    """Join a cluster or start one. Raises EnvironmentFault, and KeyboardInterrupt on SIGTERM."""
    try:
        with _guarded_signals():
            if address not in {"auto", "local"}:  # when nothing listens there, Ray itself would retry for minutes
                socket.create_connection(host_and_port(address), timeout=10).close()
            ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
    except SystemExit as error:  # from Ray's SIGTERM handler
        raise KeyboardInterrupt from error
    except (Exception, _JoinTimeout) as error:  # Ray also raises plain Exception
        raise EnvironmentFault(
            f"--ray {address}: cannot join or start a cluster ({error_line(error)}). Pass HOST:PORT of its head node, "
            "auto for the cluster that this machine belongs to, or local to start one here. If the address is right, "
            "the machine may be overloaded: try again; Ray's logs are in /tmp/ray. A cluster with token "
            "authentication needs RAY_AUTH_MODE and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from error


class _JoinTimeout(BaseException):
    """Joining took too long. Not an Exception, because Ray retries after those."""


@contextmanager
def _guarded_signals() -> Iterator[None]:
    """Raise _JoinTimeout after JOIN_TIMEOUT seconds. Restore the signal handlers that Ray replaces.

    Does nothing outside the main thread, where no signal handlers can be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(_number: int, _frame: FrameType | None) -> None:
        raise _JoinTimeout(f"no answer for {JOIN_TIMEOUT} s")

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(JOIN_TIMEOUT)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            if handler is not None:  # None: not installed by Python
                signal.signal(number, handler)


def error_line(error: BaseException) -> str:
    """Return the most informative line of an error: the first, or the last of a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if "Traceback" in str(error) else 0][:300]
