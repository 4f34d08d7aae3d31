"""Whose turn it is: start-time fair queueing, first between models, then between the clients of a model.

After Goyal, Vin and Cheng, "Start-time Fair Queueing" (SIGCOMM 1996). Everybody who waits has a *start*: how much has
been done for them, on a clock that all share. The lowest start is next, and what is done for somebody moves their
start on by its cost. Who comes begins at the clock's present time: nobody saves up turns by staying away, and nobody
who has just been served comes before a newcomer.

In the paper the clock shows the start of what was served last. Here it also moves by a share of every cost, because
clients are not a fixed set: new ones without end would all begin at a clock that stands still, ahead of who waits.
"""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FlowScheduler:
    """Whose turn it is among those who wait, each known by a name.

    Who leaves is forgotten as soon as the clock has caught up with what was done for them, all at the latest when
    nobody waits: what is kept does not grow with the number of names that ever were.
    """

    def __init__(self) -> None:
        self._virtual_time = 0.0
        self._start_tags: dict[str, float] = {}  # of who waits, in the order in which they came
        self._ahead: dict[str, float] = {}  # of who has left and has had more than the clock shows
        self._catching_up: list[tuple[float, str]] = []  # the same as a heap, with some that are back

    def __len__(self) -> int:
        return len(self._start_tags)

    def __contains__(self, name: str) -> bool:
        return name in self._start_tags

    def join(self, name: str) -> None:
        """Begin to wait."""
        self._start_tags[name] = max(self._virtual_time, self._ahead.pop(name, 0.0))

    def leave(self, name: str) -> None:
        """Cease to wait."""
        start = self._start_tags.pop(name)
        if not self._start_tags:
            self._virtual_time = 0.0
            self._ahead.clear()
            self._catching_up.clear()
        elif start > self._virtual_time:
            self._ahead[name] = start
            heapq.heappush(self._catching_up, (start, name))

    def next(self) -> str:
        """Return who is next; of equal starts who came first.

        Looks at all who wait: 0.05 ms for a thousand, of which there are no more while a door lets in 1024 views.
        """
        return min(self._start_tags, key=self._start_tags.__getitem__)

    def charge(self, name: str, cost: float) -> None:
        """Count what was done for somebody who waits, whether it was their turn or not."""
        start = self._start_tags[name]
        self._start_tags[name] = start + cost
        self._virtual_time = max(
            start, self._virtual_time + cost / (len(self._start_tags) + 1)
        )  # one more: who may come now
        while self._catching_up and self._catching_up[0][0] <= self._virtual_time:
            _, caught_up = heapq.heappop(self._catching_up)
            if self._ahead.get(caught_up, self._virtual_time + 1) <= self._virtual_time:
                del self._ahead[caught_up]

    def start_tags(self) -> Iterator[tuple[str, float]]:
        """Give who waits and their starts, in the order in which they came."""
        return iter(self._start_tags.items())

    def entry_count(self) -> int:
        """Return of how many something is kept."""
        return len(self._start_tags) + len(self._ahead) + len(self._catching_up)


class _ModelQueue(Generic[Item]):
    """What waits for one model, by client; each item with its cost."""

    def __init__(self) -> None:
        self.flows = FlowScheduler()
        self.items: dict[str, dict[Item, float]] = {}


class FairQueue(Generic[Item]):
    """Items that wait for models, each of a client, in fair order; a client's own in the order in which they came.

    Not safe in several threads at once: whoever holds it has a lock.
    """

    def __init__(self) -> None:
        self._flows = FlowScheduler()
        self._models: dict[str, _ModelQueue[Item]] = {}
        self._owners: dict[Item, tuple[str, str]] = {}  # model and client

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, item: Item) -> bool:
        return item in self._owners

    def __iter__(self) -> Iterator[Item]:
        return iter(self._owners)

    def model_count(self) -> int:
        """Return for how many models something waits."""
        return len(self._flows)

    def has(self, model: str, client: str) -> bool:
        """Say whether anything of this client waits for this model."""
        return model in self._models and client in self._models[model].flows

    def put(self, item: Item, model: str, client: str, cost: float) -> None:
        """Let an item wait; cost: above 0, of the same unit for all models."""
        assert cost > 0, f"an item of cost {cost} would be served without end"
        model_queue = self._models.setdefault(model, _ModelQueue())
        if not model_queue.flows:
            self._flows.join(model)
        items = model_queue.items.setdefault(client, {})
        if not items:
            model_queue.flows.join(client)
        items[item] = cost
        self._owners[item] = model, client

    def first(self) -> Item | None:
        """Return what is next, None where nothing waits."""
        if not self._owners:
            return None
        model_queue = self._models[self._flows.next()]
        return next(iter(model_queue.items[model_queue.flows.next()]))

    def in_order(self, model: str) -> Iterator[Item]:
        """Give the items of a model in the order in which they would be served; nothing may change meanwhile."""
        model_queue = self._models[model]
        heap = [
            (start, place, client, iter(model_queue.items[client].items()))
            for place, (client, start) in enumerate(model_queue.flows.start_tags())
        ]
        heapq.heapify(heap)
        while heap:
            start, place, client, items = heap[0]
            if (following := next(items, None)) is None:
                heapq.heappop(heap)
                continue
            item, cost = following
            yield item
            heapq.heapreplace(heap, (start + cost, place, client, items))

    def take(self, item: Item) -> None:
        """Take an item to serve it, also before its turn: it is charged to its client and its model."""
        model, client = self._owners[item]
        cost = self._models[model].items[client][item]
        self._flows.charge(model, cost)
        self._models[model].flows.charge(client, cost)
        self.withdraw(item)

    def withdraw(self, item: Item) -> None:
        """Take an item out that is not served."""
        model, client = self._owners.pop(item)
        model_queue = self._models[model]
        items = model_queue.items[client]
        del items[item]
        if items:
            return
        del model_queue.items[client]
        model_queue.flows.leave(client)
        if not model_queue.flows:
            del self._models[model]
            self._flows.leave(model)

    def entry_count(self) -> int:
        """Return of how many models and clients something is kept."""
        return self._flows.entry_count() + sum(model_queue.flows.entry_count() for model_queue in self._models.values())
