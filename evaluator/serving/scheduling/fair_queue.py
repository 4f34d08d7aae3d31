"""Start-time fair queueing, first between models, then between the clients of a model.

After Goyal, Vin and Cheng, "Start-time Fair Queueing" (SIGCOMM 1996). Every waiting flow has a *start tag*: the service
that it has received, on a virtual clock shared by all flows. The flow with the lowest start tag is next, and service
raises its tag by the cost. A flow that joins starts at the present virtual time: nobody saves up turns by staying away,
and nobody who has just been served comes before a newcomer.

In the paper the virtual time is the start tag of the flow served last. Here every cost also advances it by a share,
because the set of clients is not fixed: with a clock that stands still, an endless series of new clients would all join
ahead of those that wait.
"""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FlowScheduler:
    """Chooses the next of the waiting flows, each known by a name.

    A flow that has left is forgotten as soon as the virtual time reaches its start tag, and all are when no flow waits.
    So memory does not grow with the number of names ever seen.
    """

    def __init__(self) -> None:
        self._virtual_time = 0.0
        self._start_tags: dict[str, float] = {}  # of waiting flows, in order of arrival
        self._ahead: dict[str, float] = {}  # start tags of flows that have left, later than the virtual time
        self._catching_up: list[tuple[float, str]] = []  # the same as a heap, may include flows that have rejoined

    def __len__(self) -> int:
        return len(self._start_tags)

    def __contains__(self, name: str) -> bool:
        return name in self._start_tags

    def join(self, name: str) -> None:
        """Add a flow."""
        self._start_tags[name] = max(self._virtual_time, self._ahead.pop(name, 0.0))

    def leave(self, name: str) -> None:
        """Remove a flow."""
        start = self._start_tags.pop(name)
        if not self._start_tags:
            self._virtual_time = 0.0
            self._ahead.clear()
            self._catching_up.clear()
        elif start > self._virtual_time:
            self._ahead[name] = start
            heapq.heappush(self._catching_up, (start, name))

    def next(self) -> str:
        """Return the flow with the lowest start tag; among equals, the one that joined first.

        A linear search: 0.05 ms for a thousand flows; there are no more with the default limit of 1024 views.
        """
        return min(self._start_tags, key=self._start_tags.__getitem__)

    def charge(self, name: str, cost: float) -> None:
        """Charge a waiting flow for service, whether or not it was next."""
        start = self._start_tags[name]
        self._start_tags[name] = start + cost
        flows = len(self._start_tags) + 1  # one more, for a flow that may join now
        self._virtual_time = max(start, self._virtual_time + cost / flows)
        while self._catching_up and self._catching_up[0][0] <= self._virtual_time:
            _, caught_up = heapq.heappop(self._catching_up)
            if self._ahead.get(caught_up, self._virtual_time + 1) <= self._virtual_time:
                del self._ahead[caught_up]

    def start_tags(self) -> Iterator[tuple[str, float]]:
        """Iterate over the waiting flows and their start tags, in order of arrival."""
        return iter(self._start_tags.items())

    def entry_count(self) -> int:
        """Return the number of entries kept in memory."""
        return len(self._start_tags) + len(self._ahead) + len(self._catching_up)


class _ModelQueue(Generic[Item]):
    """The items waiting for one model, by client, each with its cost."""

    def __init__(self) -> None:
        self.flows = FlowScheduler()
        self.items: dict[str, dict[Item, float]] = {}


class FairQueue(Generic[Item]):
    """Items waiting for models, in fair order; those of one client in order of arrival.

    Not thread-safe: the owner holds a lock.
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
        """Return the number of models with waiting items."""
        return len(self._flows)

    def has(self, model: str, client: str) -> bool:
        """Return whether an item of this client waits for this model."""
        return model in self._models and client in self._models[model].flows

    def put(self, item: Item, model: str, client: str, cost: float) -> None:
        """Add an item. cost: above 0, in the same unit for all models."""
        assert cost > 0, f"items of cost {cost} would be served forever"
        model_queue = self._models.setdefault(model, _ModelQueue())
        if not model_queue.flows:
            self._flows.join(model)
        items = model_queue.items.setdefault(client, {})
        if not items:
            model_queue.flows.join(client)
        items[item] = cost
        self._owners[item] = model, client

    def first(self) -> Item | None:
        """Return the next item, None if nothing waits."""
        if not self._owners:
            return None
        model_queue = self._models[self._flows.next()]
        return next(iter(model_queue.items[model_queue.flows.next()]))

    def in_order(self, model: str) -> Iterator[Item]:
        """Iterate over the items of a model in the order of service; the queue must not change meanwhile."""
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
        """Remove an item to serve it, next or not, and charge its client and its model."""
        model, client = self._owners[item]
        cost = self._models[model].items[client][item]
        self._flows.charge(model, cost)
        self._models[model].flows.charge(client, cost)
        self.withdraw(item)

    def withdraw(self, item: Item) -> None:
        """Remove an item without serving it."""
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
        """Return the number of entries kept for models and clients."""
        return self._flows.entry_count() + sum(model_queue.flows.entry_count() for model_queue in self._models.values())
