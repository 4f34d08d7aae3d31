"""What Ray's workers import from the tests: workers and readers that fail in their own ways."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from prelunet.evaluator.datasets.dataset import Reader, Sample
from prelunet.evaluator.errors import PreluNetError
from prelunet.evaluator.validation.ray_cluster import Worker
from prelunet.evaluator.validation.validate import ChunkResult

FATAL = "8/"  # beginning of the names of images that no worker survives


class CrashingWorker(Worker):
    """A worker that dies of some images, as of a decoder that crashes."""

    def evaluate(self, chunk: Sequence[Sample]) -> ChunkResult | PreluNetError:
        if any(sample.file.startswith(FATAL) for sample in chunk):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(chunk)


class WorkerCrashingAtStart(Worker):
    """A worker that dies at its start."""

    def start(self) -> str | PreluNetError:
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"


class BuggyWorker(Worker):
    """A worker with a mistake of ours."""

    def evaluate(self, chunk: Sequence[Sample]) -> ChunkResult | PreluNetError:
        raise ZeroDivisionError("on purpose")


@dataclass(frozen=True)
class DivergentReader:
    """A reader that finds other bytes in every process but one."""

    reader: Reader
    process: int

    def read(self, file: str) -> bytes:
        return self.reader.read(file) + (b"" if os.getpid() == self.process else b"other")
