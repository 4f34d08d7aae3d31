"""Evaluate on the machines of a Ray cluster: an adapter between `validate` and Ray's tasks.

A task evaluates a chunk, on a GPU several. Ray starts the workers, runs the tasks on them and repeats those of lost
workers. A worker opens the model file and the dataset by their paths, and checks that model and versions are the
driver's before it evaluates anything. Only the driver writes the run folder, chunk by chunk and in order, so the run
equals that of a single machine.
"""

import io
import logging
import os
import signal
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ..datasets.dataset import Dataset, Sample
from ..engine.load import open_with_placement
from ..engine.session import Placement, Session
from ..errors import EnvironmentFault, PreluNetError, UsageError, install_hint
from ..imaging.decode import silence_decoders
from ..json_checks import differences, format_differences
from .pipeline import ChunkResult, evaluate_chunks
from .run import RunInfo, build_run_info
from .validate import ChunkEvaluator, WorkersLost

# Chunks per task on a GPU, whose memory only the end of a process frees, so that Ray starts a process for each task.
GPU_CHUNKS = 8
MAX_TASKS_AHEAD = 16  # per worker: tasks that may be started before the results of the oldest one are written
MAX_ATTEMPTS = 3  # per task
DEFAULT_CPUS = 4  # per worker, if none are requested and the machines have as many


@dataclass(frozen=True)
class Cluster:
    """The cluster that evaluates a run.

    address: of a Ray cluster (HOST:PORT), `auto` for the one this machine belongs to, `local` to start one for this
    run; workers: number of workers, 0 for as many as fit; cpus: CPUs and threads per worker, 0 for four, or for all
    CPUs of a smaller machine.
    Raises UsageError for an address without host or port.
    """

    address: str
    workers: int = 0
    cpus: int = 0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if self.address not in {"auto", "local"} and not (host and port.isdecimal()):
            raise UsageError(
                f"--ray {self.address!r}: not the address of a cluster. Pass HOST:PORT of its head node, such as "
                "head:6379, auto for the cluster that this machine belongs to, or local to start one here"
            )


@dataclass(frozen=True)
class Job:
    """What all tasks of an evaluation need. dataset: without its samples, which come with the chunks."""

    id: str  # of the evaluation
    folder: Path  # the driver's working directory, to which paths are relative
    model: Path
    placement: Placement
    dataset: Dataset
    info: RunInfo  # of the driver's run, which must equal that of the worker's session


def evaluate_on_ray(
    cluster: Cluster,
    session: Session,
    model: Path,
    dataset: Dataset,
    info: RunInfo,
    report: Callable[[str], None] = lambda _message: None,
) -> ChunkEvaluator:
    """Return a function for `validate` that evaluates chunks on a Ray cluster. Nothing starts before it is called.

    session, model: the driver's own session and its file; info: of the run; report: receives messages about the
    workers.
    The function raises EnvironmentFault when Ray is missing, unreachable or has no room for a worker, or when a worker
    differs from the driver (the error shows the difference). It raises WorkersLost when workers are lost repeatedly
    with the same images, and each PreluNetError of a worker, with the name of its machine.
    """

    def evaluate(chunks: Sequence[Sequence[Sample]]) -> Generator[ChunkResult, None, None]:
        gpu = session.circumstances.on_gpu
        with ray_connection(cluster.address, report) as ray:
            machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            cpus, max_workers = worker_capacity(machines, cluster.cpus, gpu=gpu)
            count = min(cluster.workers or max_workers, len(chunks))
            report(f"Ray: {count} workers of {cpus} CPUs{' and a GPU' * gpu}")
            shared = replace(dataset, samples=())
            placement = replace(session.placement, threads=cpus)
            job = ray.put(Job(uuid.uuid4().hex, Path.cwd(), model, placement, shared, info))
            task = ray.remote(num_cpus=cpus, num_gpus=int(gpu), max_retries=MAX_ATTEMPTS - 1)(evaluate_group)
            size = max(1, min(GPU_CHUNKS, len(chunks) // count)) if gpu else 1
            groups = (chunks[start : start + size] for start in range(0, len(chunks), size))
            yield from results_in_order(ray, lambda group: task.remote(job, group), groups, count)

    return evaluate


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


def results_in_order(
    ray: ModuleType,
    start: Callable[[Sequence[Sequence[Sample]]], Any],
    groups: Iterable[Sequence[Sequence[Sample]]],
    workers: int,
) -> Iterator[ChunkResult]:
    """Yield the result of each chunk, in order. Until then it stays in Ray's object store.

    start: starts the task of a group; workers: number of tasks that run at a time.
    """
    pending: deque[tuple[Any, str]] = deque()  # each task whose results are not taken, and its first image
    running: list[Any] = []
    for group in groups:
        if len(running) == workers:
            _, running = ray.wait(running)
        running.append(start(group))
        pending.append((running[-1], group[0][0].file))
        while pending[0][0] not in running or len(pending) > MAX_TASKS_AHEAD * workers:
            yield from _results(ray, *pending.popleft())
    for task, first in pending:
        yield from _results(ray, task, first)


def _results(ray: ModuleType, task: Any, first: str) -> list[ChunkResult]:
    """Wait for the results of a task. first: its first image."""
    try:
        results: list[ChunkResult] = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PreluNetError):
            raise error.cause from None
        raise  # a bug; it includes the worker's traceback
    except ray.exceptions.RayError as error:
        reason = f"while evaluating images from {first} on ({error_line(error)})"
        raise WorkersLost(f"{MAX_ATTEMPTS} workers were lost {reason}") from error
    return results


_sessions: dict[str, Session] = {}  # by the job's id, for the tasks that run later in the same process


def evaluate_group(job: Job, chunks: Sequence[Sequence[Sample]]) -> list[ChunkResult]:
    """Evaluate chunks on a worker, as a task. Raises each PreluNetError with the name of the machine."""
    try:
        if job.id not in _sessions:
            _sessions[job.id] = _open_session(job)
        assert job.info.batching is not None, "None only for ensembles"
        size, threads = job.info.batching.images_together, job.placement.threads
        return list(evaluate_chunks([_sessions[job.id]], job.dataset, job.info.protocol, chunks, size, threads))
    except PreluNetError as error:
        raise type(error)(f"worker on {socket.gethostname()}: {error}") from error


def _open_session(job: Job) -> Session:
    """Open the model and check that this machine matches the driver."""
    silence_decoders()
    info, memory = job.info, job.placement.memory
    try:
        if job.folder.is_dir():
            os.chdir(job.folder)
        session = open_with_placement(job.model, job.placement, preallocate=True)
        here = build_run_info(session, info.model["file"], info.dataset, info.protocol, info.shard, memory=memory)
        if found := differences(info.to_json(), here.to_json(), places=("on the driver", "on this worker")):
            raise EnvironmentFault(f"differs from the driver:\n{format_differences(found)}")
    except PreluNetError as error:
        fix = "Every machine needs the same versions, and the same model and images at the same paths"
        raise type(error)(f"cannot start: {error}\n{fix}") from error
    return session


@contextmanager
def ray_connection(address: str, report: Callable[[str], None]) -> Iterator[ModuleType]:
    """Connect to a cluster and yield Ray's module. On exit, the workers end, and so does a local cluster.

    Meanwhile nothing is written to stdout, which carries our result: Ray prints messages about workers there, and has
    no option to disable that. Its usage statistics are disabled unless RAY_USAGE_STATS_ENABLED is 1.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # avoids a deprecation warning
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # of 41 s each where no cluster answers; by default 20
    os.environ.setdefault("RAY_task_oom_retries", str(MAX_ATTEMPTS - 1))  # if memory is short; by default for ever
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
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address not in {"auto", "local"}:  # when nothing listens there, Ray itself would retry for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
    except SystemExit as error:  # from Ray's SIGTERM handler
        raise KeyboardInterrupt from error
    except Exception as error:  # Ray also raises plain Exception
        raise EnvironmentFault(
            f"--ray {address}: cannot join or start a cluster ({error_line(error)}). Pass HOST:PORT of its head node, "
            "auto for the cluster that this machine belongs to, or local to start one here. If the address is right, "
            "the machine may be overloaded: try again; Ray's logs are in /tmp/ray. A cluster with token "
            "authentication needs RAY_AUTH_MODE and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from error
    finally:  # Ray replaces the handler, in the main thread; None: not installed by Python
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def error_line(error: BaseException) -> str:
    """Return the most informative line of an error: the first, or the last of a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if "Traceback" in str(error) else 0][:300]
