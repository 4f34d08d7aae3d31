"""Files that a server reads again when they change: certificates and tokens."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.rpc.tls import read_small_file
from prelunet.evaluator.serving.observability.metrics import Metrics

INTERVAL = 1.0  # seconds between two looks at the files

log = logging.getLogger(__name__)

Value = TypeVar("Value")
Contents: TypeAlias = tuple[bytes, ...]


class WatchedFiles(Generic[Value]):
    """The value of files that belong together. A new one replaces it only if it is valid.

    A change counts once two looks find the same contents, so that half-written files and half-replaced pairs are seldom
    read.
    name: of the files in log and metrics; parse: returns the value of the contents, raises UsageError.
    The constructor raises the UsageError of `parse`, or for a file that cannot be read.
    """

    def __init__(self, name: str, paths: Sequence[Path], parse: Callable[[Contents], Value], metrics: Metrics) -> None:
        self._name, self._paths, self._parse = name, paths, parse
        self._reloads = metrics.reloads
        for outcome in ("loaded", "refused"):
            self._reloads.labels(name, outcome)
        self._contents = self._last_look = self._read()
        self.value = parse(self._contents)

    def poll(self) -> None:
        """Look at the files, and replace the value if they have changed."""
        try:
            contents, problem = self._read(), None
        except UsageError as error:
            contents, problem = (str(error).encode(),), error
        settled, self._last_look = contents == self._last_look, contents
        if not settled or contents == self._contents:
            return
        self._contents = contents  # also if they are refused: reported once
        try:
            if problem is not None:
                raise problem
            self.value = self._parse(contents)
        except Exception as error:  # whatever it is, further changes are read
            self._reloads.labels(self._name, "refused").inc()
            log.error("the changed %s are not used, the previous ones stay: %s", self._name, error)
        else:
            self._reloads.labels(self._name, "loaded").inc()
            log.info("the changed %s are in use", self._name)

    def _read(self) -> Contents:
        return tuple(map(read_small_file, self._paths))


async def poll_forever(files: Sequence[WatchedFiles[Any]]) -> None:
    """Poll files at intervals, in a thread: a network file system may take long."""
    while True:
        await asyncio.sleep(INTERVAL)
        for each in files:
            await asyncio.to_thread(each.poll)
