"""Start-time fair queueing at several levels: between models, then their clients, then the connections of a client.

After Goyal, Vin and Cheng, "Start-time Fair Queueing" (SIGCOMM 1996). Every waiting flow has a *start tag*: the service
that it has received, on a virtual clock shared by all flows. The flow with the lowest start tag is next, and service
raises its tag by the cost. A flow that joins starts at the present virtual time: nobody saves up turns by staying away,
and nobody who has just been served comes before a newcomer.

In the paper the virtual time is the start tag of the flow served last. Here every cost also advances it by a share,
because the set of clients is not fixed: with a clock that stands still, an endless series of new clients would all join
ahead of those that wait.
"""

import heapq
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FlowScheduler:
    """Chooses the next of the waiting flows, each known by a name.

    A flow that has left is forgotten as soon as the virtual time reaches its start tag, and all are when no flow waits.
    So memory does not grow with the number of names ever seen.
    """

    __slots__ = ("_ahead", "_catching_up", "_start_tags", "_virtual_time")

    def __init__(self) -> None:
        self._virtual_time = 0.0
        self._start_tags: dict[str, float] = {}  # of waiting flows, in order of arrival
        self._ahead: dict[str, float] = {}  # start tags of flows that have left, later than the virtual time
        self._catching_up: list[tuple[float, str]] = []  # the same as a heap, may include flows that have rejoined

    def join(self, name: str) -> None:
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

    def next(self, without: Collection[str] = ()) -> str | None:
        """Return the flow with the lowest start tag; among equals, the one that joined first. None: there is none.

        A linear search: 0.05 ms for a thousand flows; there are no more with the default limit of 1024 views.
        """
        names = [name for name in self._start_tags if name not in without] if without else self._start_tags
        return min(names, key=self._start_tags.__getitem__, default=None)

    def first(self) -> str:
        """Return the same of all flows; there is one."""
        return min(self._start_tags, key=self._start_tags.__getitem__)

    def charge(self, name: str, cost: float) -> None:
        """Charge a waiting flow for service, whether or not it was next."""
        start = self._start_tags[name]
        self._start_tags[name] = start + cost
        flows = len(self._start_tags) + 1  # one more, for a flow that may join now
        self._virtual_time = max(start, self._virtual_time + cost / flows)
        while self._catching_up and self._catching_up[0][0] <= self._virtual_time:
            _, caught_up = heapq.heappop(self._catching_up)
            if caught_up in self._ahead and self._ahead[caught_up] <= self._virtual_time:
                del self._ahead[caught_up]

    def tags(self) -> Iterator[tuple[str, float]]:
        """Iterate over the waiting flows and their start tags, in order of arrival."""
        return iter(self._start_tags.items())


class _Node(Generic[Item]):
    """A flow that consists of flows, by name, or, at the last level, of items with their costs."""

    __slots__ = ("children", "flows", "items")

    def __init__(self) -> None:
        self.flows = FlowScheduler()
        self.children: dict[str, _Node[Item]] = {}
        self.items: dict[Item, float] = {}

    def in_order(self) -> Iterator[tuple[Item, float]]:
        """Iterate over the items in the order of service, with their costs."""
        if not self.children:
            yield from self.items.items()
            return
        heap = [(start, place, self.children[name].in_order()) for place, (name, start) in enumerate(self.flows.tags())]
        heapq.heapify(heap)
        while heap:
            start, place, items = heap[0]
            if (following := next(items, None)) is None:
                heapq.heappop(heap)
            else:
                yield following
                heapq.heapreplace(heap, (start + following[1], place, items))


class FairQueue(Generic[Item]):
    """Items in fair order at each level of their paths; those of one path in order of arrival.

    A path names the flows that an item belongs to, such as (model, address, connection). All paths have equal lengths.
    Not thread-safe: the owner holds a lock.
    """

    def __init__(self) -> None:
        self._root: _Node[Item] = _Node()
        self._paths: dict[Item, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, item: Item) -> bool:
        return item in self._paths

    def __iter__(self) -> Iterator[Item]:
        return iter(self._paths)

    def flow_count(self) -> int:
        """Return the number of flows at the first level."""
        return len(self._root.children)

    def has(self, path: tuple[str, ...]) -> bool:
        """Return whether an item of this path, or of one that begins with it, waits."""
        node: _Node[Item] | None = self._root
        for name in path:
            node = node and node.children.get(name)
        return node is not None

    def put(self, item: Item, path: tuple[str, ...], cost: float) -> None:
        """Add an item. cost: above 0, in the same unit for all."""
        assert cost > 0, f"items of cost {cost} would be served forever"
        node = self._root
        for name in path:
            if name not in node.children:
                node.children[name] = _Node()
                node.flows.join(name)
            node = node.children[name]
        node.items[item] = cost
        self._paths[item] = path

    def first(self, without: Collection[str] = ()) -> Item | None:
        """Return the next item, None if nothing waits. without: names of flows that are passed over, at any level."""
        if without:
            return self._first(self._root, without) if self._paths else None
        node = self._root
        while node.children:
            node = node.children[node.flows.first()]
        return next(iter(node.items), None)

    def _first(self, node: _Node[Item], without: Collection[str]) -> Item | None:
        if not node.children:
            return next(iter(node.items), None)
        empty = set(without)
        while (name := node.flows.next(empty)) is not None:
            if (item := self._first(node.children[name], without)) is not None:
                return item
            empty.add(name)
        return None

    def in_order(self, name: str) -> Iterator[Item]:
        """Iterate over the items of a flow of the first level in the order of service.

        The queue must not change meanwhile.
        """
        return (item for item, _ in self._root.children[name].in_order())

    def take(self, item: Item) -> None:
        """Remove an item to serve it, next or not, and charge all its flows."""
        *nodes, last = self._nodes(item)
        for node, name in zip(nodes, self._paths[item], strict=True):
            node.flows.charge(name, last.items[item])
        self.withdraw(item)

    def withdraw(self, item: Item) -> None:
        """Remove an item without serving it."""
        *nodes, last = self._nodes(item)
        del last.items[item]
        for node, name in zip(reversed(nodes), reversed(self._paths.pop(item)), strict=True):
            child = node.children[name]
            if child.children or child.items:
                return
            del node.children[name]
            node.flows.leave(name)

    def _nodes(self, item: Item) -> list[_Node[Item]]:
        """Return the nodes from the root to the item's own."""
        nodes = [self._root]
        for name in self._paths[item]:
            nodes.append(nodes[-1].children[name])
        return nodes
