"""A process that has everything imported and forks one child for each order, so that many children can be killed.

An order is a line of JSON on stdin; the answers on stdout are the child's process id and, when it has ended, its exit
code (-9 after kill -9). Started by `ForkServer`; a child calls `run_order`.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prelunet.evaluator.datasets.open import open_dataset
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.ray_cluster import Cluster, evaluate_on_ray
from prelunet.evaluator.validation.run import build_run_info, describe_dataset
from tests.helpers.fakes import FakeSession, repeated, validated

TESTS = str(Path(__file__).parents[2])
KILL_POINTS = ("fsync", "truncate", "replace", "unlink")  # functions of `os` that change files


class ForkServer:
    """The parent of children that validate."""

    def __init__(self, process: "subprocess.Popen[str]"):
        self._process = process

    def begin(self, **order: Any) -> int:
        """Start a child; return its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order, default=str) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def end(self) -> int:
        """Return the exit code of the child, when it has ended."""
        return int(self._answer())

    def kill_after(self, seconds: float, **order: Any) -> int:
        """Kill a child with SIGKILL after some seconds; return its exit code: -9, or 0 if it was faster."""
        child = self.begin(**order)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        return self.end()

    def kill_at_step(self, step: int, **order: Any) -> int:
        """Kill a child at a step that changes a file (0: at none); return its exit code: -9, or 0 if it had fewer."""
        self.begin(dies_at=step, **order)
        code = self.end()
        assert code in {0, -signal.SIGKILL}, "the child failed before it could be killed"
        return code

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, "the fork server has died"
        return answer


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Start the process, and end it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from tests.helpers import child_processes; child_processes.main()"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:  # which closes stdin, and so ends it
        yield ForkServer(process)


def main() -> None:
    """Serve orders until stdin ends."""
    import ray  # noqa: F401 - slow to import, and some children need it; it reads its variables here, once

    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _run_child(order)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _run_child(order: dict[str, Any]) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    code = 1
    try:
        arm_kill(order.pop("dies_at", 0))
        run_order(**order)
        code = 0
    finally:
        os._exit(code)


def arm_kill(number: int) -> None:
    """Kill this process at step `number` of those that change a file, counted from 1; 0: never.

    Steps are the calls of KILL_POINTS, before which it dies, and each write to a file opened for appending, half of
    which is written.
    """
    left = number

    def is_time() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if is_time():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    class TornFile(io.FileIO):
        def write(self, data: Any) -> int:
            if is_time():
                super().write(data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return super().write(data)

    open_plainly = Path.open

    def open_torn(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        return TornFile(path, mode) if mode == "ab" else open_plainly(path, mode, *arguments, **options)

    Path.open = open_torn  # type: ignore[method-assign]
    for name in KILL_POINTS:
        setattr(os, name, deadly(getattr(os, name)))


def run_order(
    data: str,
    folder: str,
    copies: int,
    *,
    fresh: bool = False,
    model: str = "",
    address: str = "",
    heatmaps: int | None = None,
) -> None:
    """Validate a folder of images, each `copies` times, with a fake session, or with a model on a Ray cluster.

    heatmaps: of how many mistakes; None for a protocol without.
    """
    session: Any = open_session(Path(model), "cpu", threads=1) if model else FakeSession()
    classes = [entry.wnid for entry in session.contract.classes]
    dataset = repeated(open_dataset(Path(data), split="val", wnids=classes), copies)
    protocol = build_protocol("center" if not model and heatmaps is None else "dense-32", session.contract)
    info = build_run_info(session, "m.onnx", describe_dataset(dataset), protocol)
    chunk_evaluator = evaluate_on_ray(Cluster(address, cpus=2), session, Path(model), dataset, info) if model else None
    options = {"fresh": fresh, "heatmaps": heatmaps or 0}
    validated(session, dataset, protocol, Path(folder), **options, chunk_evaluator=chunk_evaluator)
