"""A process that is asked over its standard input and answers over its standard output, a line of JSON each."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common.results import environment

Json = dict[str, Any]


class Worker:
    """A module that is run with one argument, started with one argument, kept until `close`."""

    def __init__(self, module: str, argument: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environment(), "GRPC_VERBOSITY": "NONE"},
        )  # fmt: skip

    def send(self, question: Mapping[str, Any]) -> None:
        """Send a question; its answer is the next that `told` returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Json:
        """Return the answer; RuntimeError when the process has ended, or says that it failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
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
    """Answer until the standard input ends; what goes wrong is told, and the next question is answered."""
    for line in sys.stdin:
        try:
            said = answer(json.loads(line))
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
