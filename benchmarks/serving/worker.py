"""A process that reads questions from stdin and writes answers to stdout, one JSON line each."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common.results import environment

Json = dict[str, Any]


class Worker:
    """A process that runs a module with one argument until `close`."""

    def __init__(self, module: str, argument: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environment(), "GRPC_VERBOSITY": "NONE"},
        )  # fmt: skip

    def send(self, question: Mapping[str, Any]) -> None:
        """Send a question; `receive` returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Json:
        """Return the next answer; raises RuntimeError if the process has ended or reports an error."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} exited with {self._process.wait()}")
        answer: Json = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def answer_questions(answer: Callable[[Json], Json]) -> None:
    """Answer questions until stdin ends; an exception becomes an error answer, and the next question follows."""
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)
