"""Evaluation on the machines of a Ray cluster: an adapter between `validate` and Ray's actors.

The driver hands out chunks and alone writes the run folder, chunk by chunk in their order, so that the run is the one
that a single machine would have made. A worker opens the model file and the dataset by their paths and shows that they
are the driver's before it is given anything to do. What a lost worker had in hand is handed out again; what it may
still answer is not listened to, so that each image is counted once.
"""

import hashlib
import heapq
import io
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TextIO, cast

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.engine.classify import EvaluationSession
from prelunet.evaluator.engine.load import open_with_placement
from prelunet.evaluator.engine.session import Outputs, Placement, Session
from prelunet.evaluator.errors import DatasetError, EnvironmentFault, PreluNetError, UsageError, install_hint
from prelunet.evaluator.json_checks import differences, format_differences
from prelunet.evaluator.protocols import EvaluationProtocol
from prelunet.evaluator.validation.pipeline import ChunkResult, evaluate_chunks
from prelunet.evaluator.validation.run import Batching, RunInfo
from prelunet.evaluator.validation.validate import ChunkEvaluator, WorkersLost

MAX_CHUNKS_IN_FLIGHT = 2  # chunks that a worker has: while the session computes one, threads decode the other
MAX_CHUNKS_AHEAD = 4  # chunks per worker that may be begun before the first of them is finished and can be written
MAX_ATTEMPTS = 3  # at one chunk, and at starting each worker
DEFAULT_CPUS = 4  # of a worker, where nothing else is asked for and the machines have so many
PROBE_IMAGES = 8  # images that a worker must have as the driver has them
STALL_SECONDS = 30.0  # seconds without an answer, after which it is said what is being waited for


@dataclass(frozen=True)
class Cluster:
    """By whom a run is evaluated.

    address: of a Ray cluster (HOST:PORT), `auto` for the one that runs on this machine, `local` for one that is
    started for this run; workers: how many, 0 for as many as the cluster has room for; cpus: of each, which are its
    threads too, 0 for four or all of a smaller machine.
    Raises UsageError when the address is none of these.
    """

    address: str
    workers: int = 0
    cpus: int = 0

    def __post_init__(self) -> None:
        """Refuse what Ray would take for something else, or only complain of after a while."""
        if self.address not in {"auto", "local"}:
            host_and_port(self.address)


@dataclass(frozen=True)
class Job:
    """What each worker is told once. dataset: without its samples, which come with the chunks."""

    folder: Path  # where the driver runs, from which relative paths are meant
    model: Path
    placement: Placement
    dataset: Dataset
    protocol: EvaluationProtocol
    batching: Batching
    facts: Mapping[str, Any]  # of the driver's session, which the worker's must share
    probes: Sequence[tuple[str, str]]  # names of images and the sha256 of their bytes


def evaluate_on_ray(
    cluster: Cluster,
    session: Session,
    model: Path,
    dataset: Dataset,
    info: RunInfo,
    report: Callable[[str], None] = lambda _message: None,
) -> ChunkEvaluator:
    """Return what evaluates chunks on a Ray cluster, for `validate`; nothing is started before it is called.

    session, model: the driver's own session and its file; info: of the run; announce: told who evaluates, and when a
    worker is lost.
    Raises, when called, EnvironmentFault when Ray is missing, out of reach or without room for a worker, or when a
    worker is not like the driver (the difference is shown); WorkersLost when workers are lost again and again; and
    what a worker raises of our own errors, naming its machine.
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
            probes = [(file, _digest(shared, file)) for file in _probes(chunks)]
            assert info.batching is not None, "a run that computes says how"
            placement = replace(session.placement, threads=cpus)
            job = Job(Path.cwd(), model, placement, shared, info.protocol, info.batching, _facts(session), probes)
            job_ref = ray.put(job)
            actor = ray.remote(num_cpus=cpus, num_gpus=int(gpu), max_concurrency=MAX_CHUNKS_IN_FLIGHT)(Worker)
            yield from WorkerPool(ray, lambda: actor.remote(job_ref), count, chunks, report).results()

    return evaluate


def _facts(session: EvaluationSession) -> dict[str, Any]:
    batching = {"batching": session.rules.to_json()}
    return {"model": {"sha256": session.model_sha256}, **session.circumstances.to_json(), **batching}


def _probes(chunks: Sequence[Sequence[Sample]]) -> list[str]:
    """Return the names of some images, spread over all chunks."""
    return [
        chunks[place][-1].file
        for place in sorted({len(chunks) * probe // PROBE_IMAGES for probe in range(PROBE_IMAGES)})
    ]


def _digest(dataset: Dataset, file: str) -> str:
    return hashlib.sha256(dataset.reader.read(file)).hexdigest()


def worker_capacity(machines: Sequence[Mapping[str, float]], cpus: int, *, gpu: bool) -> tuple[int, int]:
    """Return the CPUs of each worker, and for how many workers there is room.

    machines: resources of each, as Ray names them; cpus: asked for, see `Cluster`; gpu: whether each needs one.
    """
    usable = [(int(machine.get("CPU", 0)), int(machine.get("GPU", 0))) for machine in machines]
    usable = [machine for machine in usable if machine[0] and machine[1] >= gpu]
    cpus = cpus or min([DEFAULT_CPUS, *(machine[0] for machine in usable)])
    workers = sum(min(machine[0] // cpus, machine[1]) if gpu else machine[0] // cpus for machine in usable)
    if not workers:
        raise EnvironmentFault(
            f"--ray: none of the cluster's {len(machines)} machines has {cpus} CPUs{' and a GPU' * gpu} for a worker. "
            "Ask for fewer with --threads, or add machines"
        )
    return cpus, workers


class Worker:
    """What runs on a machine of the cluster, as a Ray actor with MAX_CHUNKS_IN_FLIGHT threads.

    Errors of ours are returned, not raised: raised they would come back as Ray's.
    """

    def __init__(self, job: Job):
        self._job = job
        self._session: EvaluationSession | None = None

    def start(self) -> str | PreluNetError:
        """Open the model and check that this machine has what the driver has; return which worker this is."""
        job = self._job
        try:
            if job.folder.is_dir():
                os.chdir(job.folder)
            session = open_with_placement(job.model, job.placement, preallocate=True)
            found = differences(job.facts, _facts(session), places=("where the run was started", "here"))
            if found:
                raise EnvironmentFault(f"not the same:\n{format_differences(found)}")
            if changed := [file for file, digest in job.probes if _digest(job.dataset, file) != digest]:
                raise DatasetError(f"{job.dataset.location}: {changed[0]} is another image here")
        except PreluNetError as error:
            fix = "Every machine needs the same versions, and the same model and images by the same paths"
            return type(error)(f"worker on {socket.gethostname()} cannot start: {error}\n{fix}")
        self._session = _LockedSession(session)
        return f"process {os.getpid()} on {socket.gethostname()}"

    def evaluate(self, chunk: Sequence[Sample]) -> ChunkResult | PreluNetError:
        """Evaluate one chunk; called after `start`, in several threads."""
        assert self._session is not None, "a worker is given chunks when it has started"
        job = self._job
        try:
            size, threads = job.batching.images_together, job.placement.threads
            (result,) = evaluate_chunks([self._session], job.dataset, job.protocol, [chunk], size, threads)
        except PreluNetError as error:
            return type(error)(f"worker on {socket.gethostname()}: {error}")
        return result


class _LockedSession:
    """A session for several threads: one runs it, the others wait."""

    def __init__(self, session: EvaluationSession):
        self.contract = session.contract
        self.model_sha256 = session.model_sha256
        self.circumstances = session.circumstances
        self.rules = session.rules
        self.stage = session.stage
        self._compute = session.compute
        self._turn = threading.Lock()

    def run(self, images: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> Outputs:
        """Run N canvases; see `Session.run`."""
        return self.compute(self.stage(images, sizes))

    def compute(self, staged: Any) -> Outputs:
        """Run canvases that were staged; see `Session.compute`."""
        with self._turn:
            return self._compute(staged)


class WorkerPool:
    """The workers of one evaluation, and who has which chunk in hand.

    ray: the module; hire: starts one more worker; count: how many there should be.
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
        self._todo = list(range(len(chunks)))  # a heap: the first is needed first
        self._pending: dict[Any, tuple[Any, int | None]] = {}  # answer → worker and its chunk; None: its start
        self._idle: list[Any] = []  # workers, each as often as it can take a chunk
        self._losses: Counter[int | None] = Counter()  # chunk, or None for a start → workers that were lost with it
        self._places: dict[Any, str] = {}  # worker that has started → where it is
        self._stalls = 0  # in a row, of STALL_SECONDS seconds each
        for _ in range(count):
            self._start_worker()

    def results(self) -> Iterator[ChunkResult]:
        """Yield the result of each chunk, in their order."""
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
        """Give chunks below `end` to workers that can take one."""
        while self._idle and self._todo and self._todo[0] < end:
            number, worker = heapq.heappop(self._todo), self._idle.pop(0)
            self._pending[worker.evaluate.remote(self._chunks[number])] = worker, number

    def _next_answer(self) -> dict[int, ChunkResult]:
        """Wait for an answer; return it under its chunk's number, or nothing when it was no result."""
        answers, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=STALL_SECONDS)
        if not answers:
            self._report_stall()
            return {}
        self._stalls = 0
        worker, number = self._pending.pop(answers[0])
        try:
            answer = self._ray.get(answers[0])
        except self._ray.exceptions.RayTaskError:
            raise  # a mistake of ours; it tells its place on the worker
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
        """Say what is being waited for, after 1, 2, 4, ... times STALL_SECONDS: it may be only slow, or hang."""
        self._stalls += 1
        if self._stalls & (self._stalls - 1):
            return
        waiting = [(number, worker) for worker, number in self._pending.values() if number is not None]
        if not waiting:
            self._report("Ray: the cluster has no room for a worker yet; waiting")
            return
        number, worker = min(waiting, key=lambda pending: pending[0])
        self._report(
            f"Ray: no answer for {self._stalls * STALL_SECONDS:.0f} s; waiting for the images {self._images_of(number)} "
            f"from {self._places[worker]}. If it hangs, end that process: another does its work again"
        )

    def _images_of(self, chunk: int) -> str:
        return f"{self._chunks[chunk][0].file} to {self._chunks[chunk][-1].file}"

    def _replace_worker(self, worker: Any, number: int | None, reason: str) -> None:
        """Take back what a lost worker had in hand, and start another in its place."""
        in_flight = {number, *(other for owing, other in self._pending.values() if owing is worker)}
        self._pending = {answer: pending for answer, pending in self._pending.items() if pending[0] is not worker}
        self._idle = [other for other in self._idle if other is not worker]
        self._places.pop(worker, None)
        self._ray.kill(worker)  # it may live on, out of reach
        self._losses.update(in_flight)
        for chunk in [chunk for chunk in in_flight if chunk is not None]:
            heapq.heappush(self._todo, chunk)
            if self._losses[chunk] >= MAX_ATTEMPTS:
                place = self._images_of(chunk)
                raise WorkersLost(f"{MAX_ATTEMPTS} workers were lost with the images {place} in hand ({reason})")
        if self._losses[None] >= MAX_ATTEMPTS * self._count:
            raise WorkersLost(f"{self._losses[None]} workers in a row were lost at their start ({reason})")
        self._report(f"Ray: a worker was lost ({reason}); another does its work again")
        self._start_worker()


# Joining a Ray cluster or starting one: what `cluster` works on, or one of our errors.
#
# Ray is imported when it is asked for; it comes with the extra `ray`.


JOIN_TIMEOUT = 120  # seconds after which a cluster that neither takes us in nor refuses us is given up


def host_and_port(address: str) -> tuple[str, int]:
    """Read HOST:PORT, with a host of IPv6 in brackets."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):([0-9]{1,5})", address)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise UsageError(
            f"--ray {address!r}: no address of a cluster. Give HOST:PORT of its head, as head:6379, auto for the one "
            "that this machine belongs to, or local to start one here"
        )
    return found[1].strip("[]"), int(found[2])


@contextmanager
def ray_connection(address: str, report: Callable[[str], None]) -> Iterator[ModuleType]:
    """Give Ray's module while this process is connected to a cluster; a local one ends with it, and so do the workers.

    Ray's own words are kept from both streams, see `_RayOutputFilter`. Its usage statistics stay at home, unless
    RAY_USAGE_STATS_ENABLED is 1. Its handler of SIGTERM, which exits without a word, gives way to the one that was
    there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it warns of a change to come
    try:
        import ray
    except ImportError as error:
        raise EnvironmentFault(f"--ray: ray cannot be imported ({error}). Bring it: {install_hint('ray')}") from error
    report("Ray: starting a cluster on this machine" if address == "local" else f"Ray: joining {address}")
    with redirect_stdout(cast("TextIO", _RayOutputFilter(sys.stdout))):
        try:
            _join(ray, address)
            yield ray
        finally:
            with redirect_stdout(io.StringIO()):  # this thread prints what Ray's own had put aside
                ray.shutdown()


def _join(ray: ModuleType, address: str) -> None:
    """Connect to a cluster or start one. Raises EnvironmentFault, and KeyboardInterrupt on SIGTERM."""
    try:
        with _guarded_signals():
            _check_reachable(address)
            ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
    except SystemExit as error:  # of Ray's own handler of SIGTERM
        raise KeyboardInterrupt from error
    except (Exception, _JoinTimeout) as error:  # a bare Exception is among those of Ray
        raise EnvironmentFault(
            f"--ray {address}: no cluster could be joined ({error_line(error)}). Give HOST:PORT of its head, auto "
            "for the one that this machine belongs to, or local to start one here. Where that is right, the machine "
            "may have too much to do: try again; Ray's logs are in /tmp/ray. A cluster with a token needs "
            "Ray's own variables: RAY_AUTH_MODE and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from error


class _JoinTimeout(BaseException):
    """Joining took too long. No Exception: after each of those Ray tries again."""


@contextmanager
def _guarded_signals() -> Iterator[None]:
    """Raise _JoinTimeout after JOIN_TIMEOUT seconds; put back the handlers of signals that Ray sets.

    Only in the main thread: in others neither we nor Ray can set one.
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
            if handler is not None:  # None: it is not Python's
                signal.signal(number, handler)


class _RayOutputFilter:
    """A stream that keeps what Ray's own threads write from another, and passes on all else.

    For the whole of an evaluation one of them prints news of workers to stdout, where our result goes; no option of
    Ray's stops it. What is printed by whoever called us is his.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write it, or not."""
        if threading.current_thread().name.startswith("ray_"):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _check_reachable(address: str) -> None:
    """Raise OSError or ValueError where nobody listens at HOST:PORT: Ray itself would go on trying for minutes."""
    if address not in {"auto", "local"}:
        socket.create_connection(host_and_port(address), timeout=10).close()


def error_line(error: BaseException) -> str:
    """Return the line that tells most: the first, or the last of a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if "Traceback" in str(error) else 0][:300]
