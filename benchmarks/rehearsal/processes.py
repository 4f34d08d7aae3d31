"""Processes of `prelunet` whose progress and memory are watched, and which are killed."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.results import environment
from benchmarks.common.server_process import PRELUNET, ServerProcess
from prelunet.evaluator.validation.run import PREDICTIONS_FILE

POLL, SAMPLING = 0.02, 0.5  # seconds between looks at the progress, and between samples of the memory
KILLS = 3  # of each shard
MAX_DELAY = 0.4  # seconds between the point of a kill and the kill, so that it meets any moment of a chunk
# Memory is flat if, while images are written, no sample after the first quarter exceeds GROWTH times the largest of the
# first quarter by more than ALLOWANCE, in MB. At 300 MB that shows a leak of 2.2 kB an image over 50,000 images. A
# process with fewer than MIN_SAMPLES samples is too short to tell.
GROWTH, ALLOWANCE, MIN_SAMPLES = 1.10, 50.0, 8


@dataclass(frozen=True)
class Watched:
    """A process that ended. code: negative after a signal.

    seconds: until its end; opened_after, opening: until the dataset was open, and of these for the dataset alone;
    memory: resident MB twice a second, of `validate` from its first written chunk on; writing: number of these samples
    before its last written chunk; done: images of its run.
    """

    code: int
    seconds: float
    opened_after: float
    opening: float
    memory: tuple[float, ...]
    writing: int
    done: int

    @property
    def is_flat(self) -> bool:
        """Return whether memory is flat, or the process too short to tell."""
        quarter = self.writing // 4
        limit = GROWTH * max(self.memory[:quarter], default=0) + ALLOWANCE
        return self.writing < MIN_SAMPLES or max(self.memory[quarter : self.writing]) <= limit


def watch(words: Sequence[str | Path], run: Path, *, kill_at: float | None = None, delay: float = 0.0) -> Watched:
    """Run a verb to its end. Raises RuntimeError with its last messages if it fails.

    run: folder of its run; kill_at: size of predictions.jsonl at which SIGKILL follows after `delay` seconds.
    """
    predictions, memory = run / PREDICTIONS_FILE, list[float]()
    before = last = _size(predictions) if words[0] == "validate" else -1
    loaded = opened = due = 0.0
    writing = 0
    begun = time.monotonic()
    with ServerProcess([*PRELUNET, *map(str, words)], run.with_suffix(".log"), env=environment()) as process:
        while process.is_alive():
            now, size = time.monotonic() - begun, _size(predictions)
            if not opened:
                log = process.log
                loaded = loaded or (now if log else 0.0)  # the first message follows the loading of the model
                opened = now if " images of " in log else 0.0  # as in "50,000 images of 1,000 classes"
            if size != last:
                last, writing = size, len(memory)
            if size > before and now >= due:
                due = now + SAMPLING
                with suppress(OSError, StopIteration):  # it may have ended meanwhile
                    memory.append(process.rss_mb())
            if kill_at is not None and size >= kill_at:
                time.sleep(delay)
                process.kill()
            time.sleep(POLL)
        seconds, code = time.monotonic() - begun, process.process.returncode
        if code and kill_at is None:
            raise RuntimeError(f"prelunet {words[0]}: exit code {code}: {process.log[-400:]}")
    done = predictions.read_bytes().count(b"\n") if predictions.exists() else 0
    return Watched(code, seconds, opened, opened - loaded, tuple(memory), writing, done)


def killed_and_resumed(words: Sequence[str | Path], run: Path, size: float, seed: str) -> Iterator[Watched]:
    """Run `validate`, kill it KILLS times, each time further on, and resume it. size: of its predictions, about."""
    moments = random.Random(seed)
    for number in range(KILLS):
        share = (number + moments.uniform(0.1, 0.9)) / (KILLS + 1)
        yield watch(words, run, kill_at=share * size, delay=moments.uniform(0, MAX_DELAY))
    yield watch(words, run)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
