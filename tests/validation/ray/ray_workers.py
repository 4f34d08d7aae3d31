"""Workers and readers that fail in various ways. Ray's workers import this module."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from prelunet.evaluator.datasets.dataset import Reader, Sample
from prelunet.evaluator.errors import PreluNetError
from prelunet.evaluator.validation.ray_cluster import Worker
from prelunet.evaluator.validation.validate import ChunkResult

FATAL = "5/"  # prefix of the names of images that kill a worker


class CrashingWorker(Worker):
    """A worker that dies on some images, as if its decoder crashed."""

    def evaluate(self, chunk: Sequence[Sample]) -> ChunkResult | PreluNetError:
        if any(sample.file.startswith(FATAL) for sample in chunk):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(chunk)


class WorkerCrashingAtStart(Worker):
    """A worker that dies when it starts."""

    def start(self) -> str | PreluNetError:
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"


class BuggyWorker(Worker):
    """A worker with a bug."""

    def evaluate(self, chunk: Sequence[Sample]) -> ChunkResult | PreluNetError:
        raise ZeroDivisionError("on purpose")


@dataclass(frozen=True)
class DivergentReader:
    """A reader that returns different bytes in every process but one."""

    reader: Reader
    process: int

    def read(self, file: str) -> bytes:
        return self.reader.read(file) + (b"" if os.getpid() == self.process else b"other")
