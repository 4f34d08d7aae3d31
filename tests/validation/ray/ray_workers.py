"""Tasks and readers that fail in various ways. Ray's workers import this module."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from prelunet.evaluator.datasets.dataset import Reader, Sample
from prelunet.evaluator.validation.pipeline import ChunkResult
from prelunet.evaluator.validation.ray_cluster import Job, evaluate_group

FATAL = "5/"  # prefix of the names of images that kill a worker
DEATHS = "deaths"  # one line per process that `mortal_group` killed, in the driver's working directory


def crashing_group(job: Job, chunks: Sequence[Sequence[Sample]]) -> list[ChunkResult]:
    """Die on some images, as if the decoder crashed."""
    if any(sample.file.startswith(FATAL) for chunk in chunks for sample in chunk):
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate_group(job, chunks)


def mortal_group(job: Job, chunks: Sequence[Sequence[Sample]]) -> list[ChunkResult]:
    """Die at the end of every second task, once."""
    results = evaluate_group(job, chunks)
    with (job.folder / DEATHS).open("a+") as deaths:
        deaths.seek(0)
        first = chunks[0][0].file
        if ord(first[0]) % 2 and first not in deaths.read().splitlines():
            deaths.write(f"{first}\n")
            deaths.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    return results


def buggy_group(job: Job, chunks: Sequence[Sequence[Sample]]) -> list[ChunkResult]:
    """Have a bug."""
    raise ZeroDivisionError


@dataclass(frozen=True)
class DivergentReader:
    """A reader that returns different bytes in every process but one."""

    reader: Reader
    process: int

    def read(self, file: str) -> bytes:
        return self.reader.read(file) + (b"" if os.getpid() == self.process else b"other")
