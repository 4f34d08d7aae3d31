"""Joining a Ray cluster or starting one: what `cluster` works on, or one of our errors.

Ray is imported when it is asked for; it comes with the extra `ray`.
"""

import io
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType, ModuleType
from typing import Any, TextIO, cast

from prelunet.evaluator.errors import EnvironmentFault, UsageError, how_to_install

JOINING = 120  # seconds after which a cluster that neither takes us in nor refuses us is given up


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
def connected(address: str, announce: Callable[[str], None]) -> Iterator[ModuleType]:
    """Give Ray's module while this process is connected to a cluster; a local one ends with it, and so do the workers.

    Ray's own words are kept from both streams, see `_WithoutRay`. Its usage statistics stay at home, unless
    RAY_USAGE_STATS_ENABLED is 1. Its handler of SIGTERM, which exits without a word, gives way to the one that was
    there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it warns of a change to come
    try:
        import ray
    except ImportError as error:
        raise EnvironmentFault(f"--ray: ray cannot be imported ({error}). Bring it: {how_to_install('ray')}") from error
    announce("Ray: starting a cluster on this machine" if address == "local" else f"Ray: joining {address}")
    with redirect_stdout(cast("TextIO", _WithoutRay(sys.stdout))):
        try:
            _join(ray, address)
            yield ray
        finally:
            with redirect_stdout(io.StringIO()):  # this thread prints what Ray's own had put aside
                ray.shutdown()


def _join(ray: ModuleType, address: str) -> None:
    """Connect to a cluster or start one. Raises EnvironmentFault, and KeyboardInterrupt on SIGTERM."""
    try:
        with _our_signals():
            _knock(address)
            ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
    except SystemExit as error:  # of Ray's own handler of SIGTERM
        raise KeyboardInterrupt from error
    except (Exception, _Late) as error:  # a bare Exception is among those of Ray
        raise EnvironmentFault(
            f"--ray {address}: no cluster could be joined ({reason_of(error)}). Give HOST:PORT of its head, auto "
            "for the one that this machine belongs to, or local to start one here. Where that is right, the machine "
            "may have too much to do: try again; Ray's logs are in /tmp/ray. A cluster with a token needs "
            "Ray's own variables: RAY_AUTH_MODE and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from error


class _Late(BaseException):
    """Joining took too long. No Exception: after each of those Ray tries again."""


@contextmanager
def _our_signals() -> Iterator[None]:
    """Raise _Late after JOINING seconds; put back the handlers of signals that Ray sets.

    Only in the main thread: in others neither we nor Ray can set one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(_number: int, _frame: FrameType | None) -> None:
        raise _Late(f"no answer for {JOINING} s")

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(JOINING)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            if handler is not None:  # None: it is not Python's
                signal.signal(number, handler)


class _WithoutRay:
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


def _knock(address: str) -> None:
    """Raise OSError or ValueError where nobody listens at HOST:PORT: Ray itself would go on trying for minutes."""
    if address not in {"auto", "local"}:
        socket.create_connection(host_and_port(address), timeout=10).close()


def reason_of(error: BaseException) -> str:
    """Return the line that tells most: the first, or the last of a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if "Traceback" in str(error) else 0][:300]
