"""The other processes of a server, as one of them sees them: through the parent."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec import Struct
from prometheus_client import Metric

from ..observability.metrics import Metrics
from ..options import ServeOptions
from ..repository import Chosen, Repository
from ..watched_files import in_thread
from .link import Link


class Setup(Struct, frozen=True):
    """What the parent tells a new process.

    number: from 1; first: no other process serves yet, else this one must not open its ports before it is ready, too;
    chosen: `Repository.chosen` of another one.
    """

    options: ServeOptions
    log_format: str
    log_level: str
    number: int
    first: bool
    chosen: Chosen | None = None


class Siblings:
    """What a process asks of the others, and they of it.

    setup: of this process, once the parent has told it; metrics: of this process, which the others ask for.
    """

    setup: Setup

    def __init__(self) -> None:
        self.link = Link({"change": self._change, "metrics": self._own_metrics, "chosen": self._chosen})
        self.metrics = Metrics()
        self._repository: Repository | None = None
        self._loop = asyncio.get_running_loop()

    def share(self, repository: Repository) -> None:
        """Load and unload models in this folder when the others do, and have them do so too."""
        self._repository = repository
        repository.relay = partial(self.link.call, "change")

    def report(self, start_line: str) -> None:
        """Tell the parent that calls are answered."""
        self._reporting = asyncio.create_task(self.link.call("ready", start_line))

    def metrics_text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics of all processes; called in a thread. See `Metrics.text`."""
        asked = asyncio.run_coroutine_threadsafe(self.link.call("metrics"), self._loop)
        others: Mapping[int, Sequence[Metric]] = asked.result()
        return self.metrics.text(accept, {**others, self.setup.number: self.metrics.collect()})

    async def _change(self, change: str, model: str) -> None:
        assert self._repository is not None, "only a server of a folder is asked"
        await self._repository.change(change, model)

    async def _own_metrics(self) -> list[Metric]:
        return await in_thread(self.metrics.collect)

    async def _chosen(self) -> Chosen | None:
        return None if self._repository is None else self._repository.chosen
