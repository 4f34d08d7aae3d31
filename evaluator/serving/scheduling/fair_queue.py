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


class Turns:
    """Whose turn it is among those who wait, each known by a name.

    Who leaves is forgotten as soon as the clock has caught up with what was done for them, all at the latest when
    nobody waits: what is kept does not grow with the number of names that ever were.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._starts: dict[str, float] = {}  # of who waits, in the order in which they came
        self._ahead: dict[str, float] = {}  # of who has left and has had more than the clock shows
        self._catching_up: list[tuple[float, str]] = []  # the same as a heap, with some that are back

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, name: str) -> bool:
        return name in self._starts

    def join(self, name: str) -> None:
        """Begin to wait."""
        self._starts[name] = max(self._clock, self._ahead.pop(name, 0.0))

    def leave(self, name: str) -> None:
        """Cease to wait."""
        start = self._starts.pop(name)
        if not self._starts:
            self._clock = 0.0
            self._ahead.clear()
            self._catching_up.clear()
        elif start > self._clock:
            self._ahead[name] = start
            heapq.heappush(self._catching_up, (start, name))

    def next(self) -> str:
        """Return who is next; of equal starts who came first.

        Looks at all who wait: 0.05 ms for a thousand, of which there are no more while a door lets in 1024 views.
        """
        return min(self._starts, key=self._starts.__getitem__)

    def served(self, name: str, cost: float) -> None:
        """Count what was done for somebody who waits, whether it was their turn or not."""
        start = self._starts[name]
        self._starts[name] = start + cost
        self._clock = max(start, self._clock + cost / (len(self._starts) + 1))  # one more: who may come now
        while self._catching_up and self._catching_up[0][0] <= self._clock:
            _, caught_up = heapq.heappop(self._catching_up)
            if self._ahead.get(caught_up, self._clock + 1) <= self._clock:
                del self._ahead[caught_up]

    def starts(self) -> Iterator[tuple[str, float]]:
        """Give who waits and their starts, in the order in which they came."""
        return iter(self._starts.items())

    def remembered(self) -> int:
        """Return of how many something is kept."""
        return len(self._starts) + len(self._ahead) + len(self._catching_up)


class _OfModel(Generic[Item]):
    """What waits for one model, by client; each item with its cost."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.items: dict[str, dict[Item, float]] = {}


class FairQueue(Generic[Item]):
    """Items that wait for models, each of a client, in fair order; a client's own in the order in which they came.

    Not safe in several threads at once: whoever holds it has a lock.
    """

    def __init__(self) -> None:
        self._turns = Turns()
        self._models: dict[str, _OfModel[Item]] = {}
        self._places: dict[Item, tuple[str, str]] = {}  # model and client

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: Item) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[Item]:
        return iter(self._places)

    def models(self) -> int:
        """Return for how many models something waits."""
        return len(self._turns)

    def has(self, model: str, client: str) -> bool:
        """Say whether anything of this client waits for this model."""
        return model in self._models and client in self._models[model].turns

    def put(self, item: Item, model: str, client: str, cost: float) -> None:
        """Let an item wait; cost: above 0, of the same unit for all models."""
        assert cost > 0, f"an item of cost {cost} would be served without end"
        of_model = self._models.setdefault(model, _OfModel())
        if not of_model.turns:
            self._turns.join(model)
        items = of_model.items.setdefault(client, {})
        if not items:
            of_model.turns.join(client)
        items[item] = cost
        self._places[item] = model, client

    def first(self) -> Item | None:
        """Return what is next, None where nothing waits."""
        if not self._places:
            return None
        of_model = self._models[self._turns.next()]
        return next(iter(of_model.items[of_model.turns.next()]))

    def in_order(self, model: str) -> Iterator[Item]:
        """Give the items of a model in the order in which they would be served; nothing may change meanwhile."""
        of_model = self._models[model]
        heap = [
            (start, place, client, iter(of_model.items[client].items()))
            for place, (client, start) in enumerate(of_model.turns.starts())
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
        model, client = self._places[item]
        cost = self._models[model].items[client][item]
        self._turns.served(model, cost)
        self._models[model].turns.served(client, cost)
        self.withdraw(item)

    def withdraw(self, item: Item) -> None:
        """Take an item out that is not served."""
        model, client = self._places.pop(item)
        of_model = self._models[model]
        items = of_model.items[client]
        del items[item]
        if items:
            return
        del of_model.items[client]
        of_model.turns.leave(client)
        if not of_model.turns:
            del self._models[model]
            self._turns.leave(model)

    def remembered(self) -> int:
        """Return of how many models and clients something is kept."""
        return self._turns.remembered() + sum(of_model.turns.remembered() for of_model in self._models.values())
