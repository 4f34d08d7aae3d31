"""The start of Ray, with a fake `init` that, like Ray's, first installs its own SIGTERM handler."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import EnvironmentFault, Interrupted
from prelunet.evaluator.validation.pipeline import ChunkResult
from prelunet.evaluator.validation.ray_cluster import ray_connection
from tests.helpers.fakes import validated
from tests.validation.ray.cluster_data import TOTAL, cluster_protocol


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch, on_sigterm: Any) -> Iterator[Callable[[Callable[[], object]], list[str]]]:
    """Start Ray with a given `init`; return the messages reported before it. Checks that the handler is restored."""
    ends: list[str] = []

    def start(init: Callable[[], object]) -> list[str]:
        said: list[str] = []

        def init_of_ray(**_options: object) -> None:
            signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(number))
            assert said, "nothing is said before it may hang"
            init()

        fake = SimpleNamespace(init=init_of_ray, shutdown=lambda: ends.append("shutdown"))
        monkeypatch.setitem(sys.modules, "ray", fake)
        with ray_connection("local", said.append):
            pass
        return said

    yield start
    assert ends == ["shutdown"], "what Ray had started lives on"
    assert signal.getsignal(signal.SIGTERM) is on_sigterm


def test_the_start_of_ray_is_reported_before_it(starting: Any) -> None:
    assert starting(lambda: None) == ["Ray: starting a cluster on this machine"]


def fail() -> None:
    raise Exception("The current node timed out during startup.")


def test_a_start_that_fails_with_a_bare_exception_is_an_environment_fault_with_the_fix(starting: Any) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"--ray local: .*\(The current node timed out .*\).* try again; .*/tmp/ray"
    ):
        starting(fail)


def test_sigterm_while_ray_starts_is_an_interruption(starting: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        starting(lambda: os.kill(os.getpid(), signal.SIGTERM))


def test_sigterm_while_ray_starts_keeps_what_is_done_and_shows_how_to_resume(
    starting: Any, session: Session, model: Path, dataset: Dataset, tmp_path: Path
) -> None:
    def chunk_evaluator(_chunks: Sequence[Sequence[Sample]]) -> Generator[ChunkResult, None, None]:
        starting(lambda: os.kill(os.getpid(), signal.SIGTERM))
        yield from ()

    with pytest.raises(Interrupted, match=rf"0 of {TOTAL} images are done\. Repeat the same command or call"):
        validated(session, dataset, cluster_protocol(session), tmp_path / "run", chunk_evaluator=chunk_evaluator)


def test_a_sigterm_handler_not_installed_by_python_is_accepted(starting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = signal.getsignal
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else plain(number))
        starting(lambda: signal.signal(signal.SIGTERM, signal.default_int_handler))  # nothing else could restore it


SILENT = """
import socket
from prelunet.evaluator.validation.ray_cluster import ray_connection
with socket.create_server(("127.0.0.1", 0), backlog=99) as silent:
    with ray_connection(f"127.0.0.1:{silent.getsockname()[1]}", print):
        pass
"""


def test_a_server_that_never_answers_is_given_up() -> None:
    quickly = {"RAY_py_gcs_connect_timeout_s": "1", "RAY_gcs_rpc_server_connect_timeout_s": "1"}  # not 30 and 5
    command = [sys.executable, "-c", SILENT]
    done = subprocess.run(
        command, check=False, env={**os.environ, **quickly}, capture_output=True, text=True, timeout=60
    )
    assert re.search(r"EnvironmentFault: --ray 127\.0\.0\.1:\d+: cannot join or start a cluster", done.stderr)


def test_outside_the_main_thread_ray_starts_without_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(init=lambda **_: None, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", fake)

    def connect() -> object:
        with ray_connection("local", lambda _: None) as ray:
            return ray

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(connect).result() is fake
