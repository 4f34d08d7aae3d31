"""Functions and programs run in other processes, which may form a gloo group on this machine."""

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Its server imports torch once, and each process is forked from it: saves seconds, and copies none of pytest's threads.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "prelunet.training.distributed.hybrid", "prelunet.training.loop.train"]
)


@dataclass(frozen=True)
class ProcessResult:
    """How one process ended. value: what the function returned; error: its traceback; exit_code: -9 when killed."""

    value: Any
    error: str | None
    exit_code: int | None


def run_in_processes(size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 60) -> list[Any]:
    """Return what `function(*arguments)` returns in each of `size` processes, by rank.

    Each has torchrun's variables in its environment. Fails with the tracebacks of all processes that did not exit
    normally within this time.
    """
    ended = run_to_the_end(size, function, *arguments, seconds=seconds)
    bad = [
        f"rank {rank}: exit code {one.exit_code}\n{one.error or 'nothing was returned'}"
        for rank, one in enumerate(ended)
        if one.error is not None or one.exit_code != 0
    ]
    assert not bad, "\n".join(bad)
    return [one.value for one in ended]


def run_to_the_end(
    size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 60
) -> list[ProcessResult]:
    """Do the same, but return how each process ended; those still running in the end are killed (exit code None)."""
    port = free_port()
    started: list[tuple[BaseProcess, Connection]] = []
    for rank in range(size):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_work, args=(rank, size, port, theirs, function, arguments))
        process.start()
        theirs.close()
        started.append((process, ours))
    deadline = time.monotonic() + seconds
    try:
        return [_ended(process, ours, deadline) for process, ours in started]
    finally:
        for process, ours in started:
            process.kill()
            process.join()
            ours.close()


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _ended(process: BaseProcess, ours: Connection, deadline: float) -> ProcessResult:
    value, error = None, None
    if wait([ours], max(0, deadline - time.monotonic())):
        with contextlib.suppress(EOFError):  # it died without sending anything
            value, error = pickle.loads(ours.recv_bytes())
    process.join(max(0, deadline - time.monotonic()))
    return ProcessResult(value, error, process.exitcode)


def _work(
    rank: int, size: int, port: int, theirs: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    _set_up(rank, size, port)
    try:
        result = pickle.dumps((function(*arguments), None))
    except BaseException:
        result = pickle.dumps((None, traceback.format_exc()))
    theirs.send_bytes(result)


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended. code: its exit code, -9 when killed, None if it had to be killed; out, err: its output."""

    code: int | None
    out: str
    err: str


class Programs:
    """Runs of `prelunet` in `len(arguments)` processes, each with its own arguments and torchrun's variables."""

    def __init__(self, folder: Path, *arguments: list[str]) -> None:
        """Start the processes. folder: for files with their output."""
        port, self.folder = free_port(), folder
        self.processes = [
            CONTEXT.Process(
                target=_run_program, args=(rank, len(arguments), port, dict(os.environ), own, folder), daemon=True
            )
            for rank, own in enumerate(arguments)
        ]
        for process in self.processes:
            process.start()

    def results(self, seconds: float) -> list[ProgramResult]:
        """Wait for the processes; those that run longer are killed."""
        deadline = time.monotonic() + seconds
        results = []
        for rank, process in enumerate(self.processes):
            process.join(max(0, deadline - time.monotonic()))
            code = process.exitcode
            process.kill()
            process.join()
            results.append(ProgramResult(code, *((self.folder / f"{rank}.{name}").read_text() for name in OUTPUT)))
        return results


OUTPUT = ("out", "err")


def _run_program(
    rank: int, size: int, port: int, environment: dict[str, str], arguments: list[str], folder: Path
) -> None:
    from prelunet.evaluator.cli import run

    os.environ |= environment
    _set_up(rank, size, port)
    for descriptor, name in enumerate(OUTPUT, start=1):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY, 0o600), descriptor)
    sys.exit(run(arguments))


def _set_up(rank: int, size: int, port: int) -> None:
    import torch

    torch.set_num_threads(1)  # the processes share few cores
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",  # the host name may not resolve
    }
