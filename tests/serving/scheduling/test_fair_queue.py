import pickle
from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelunet.evaluator.serving.scheduling.fair_queue import FairQueue

Path = tuple[str, ...]


class Oracle:
    """The same rule over plain lists: forgets no flow while anything waits, and recomputes everything each time."""

    def __init__(self) -> None:
        self.items: list[tuple[str, Path, int]] = []  # name, path, cost
        self.starts: dict[Path, float] = {}  # of models, of clients of models, of connections of these
        self.clocks: dict[Path, float] = {}
        self.came: dict[Path, int] = {}
        self.numbers = count()

    def _members(self, group: Path) -> set[Path]:
        return {path[: len(group) + 1] for _, path, _ in self.items if path[: len(group)] == group}

    def put(self, name: str, path: Path, cost: int) -> None:
        for depth in range(len(path)):
            group, member = path[:depth], path[: depth + 1]
            if member not in self._members(group):
                self.starts[member] = max(self.clocks.get(group, 0.0), self.starts.get(member, 0.0))
                self.came[member] = next(self.numbers)
        self.items.append((name, path, cost))

    def first(self, without: str = "") -> str | None:
        group: Path = ()
        items = [(name, path) for name, path, _ in self.items if not {*path} & {*without}]
        while members := {path[: len(group) + 1] for _, path in items if path[: len(group)] == group} - {group}:
            group = min(members, key=lambda member: (self.starts[member], self.came[member]))
        return next((name for name, path in items if path == group), None)

    def take(self, name: str) -> None:
        _, path, cost = next(item for item in self.items if item[0] == name)
        for depth in range(len(path)):
            group, member = path[:depth], path[: depth + 1]
            clock, others = self.clocks.get(group, 0.0), len(self._members(group))
            self.clocks[group] = max(self.starts[member], clock + cost / (others + 1))
            self.starts[member] += cost
        self.withdraw(name)

    def withdraw(self, name: str) -> None:
        (item,) = (item for item in self.items if item[0] == name)
        self.items.remove(item)
        for depth in range(len(item[1])):
            group = item[1][:depth]
            if not self._members(group):  # when nothing waits, all start equal again
                self.clocks.pop(group, None)
                for member in [member for member in self.starts if member[:depth] == group and member != group]:
                    del self.starts[member]


STEPS = st.lists(
    st.tuples(
        st.sampled_from("ppptttw"),
        st.sampled_from("AB"),
        st.sampled_from("xyz"),
        st.sampled_from("12"),
        st.integers(1, 9),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(STEPS)
def test_the_order_is_that_of_a_plain_list_that_keeps_all_flows(steps: list[tuple[str, str, str, str, int]]) -> None:
    queue, oracle = FairQueue[str](), Oracle()
    for number, (step, *path, cost) in enumerate(steps):
        if step == "p":
            queue.put(f"{number}", tuple(path), cost)
            oracle.put(f"{number}", tuple(path), cost)
        elif oracle.items:
            # Some steps take or withdraw an item that is not next: views join batches.
            name = oracle.first() if cost < 7 else oracle.items[number % len(oracle.items)][0]
            assert name is not None
            (queue.take if step == "t" else queue.withdraw)(name)
            (oracle.take if step == "t" else oracle.withdraw)(name)
        assert len(queue) == len(oracle.items)
        for without in ("", "x", "yz", "A1", "xyz"):
            assert queue.first(without) == oracle.first(without)
        assert set(queue) == {item[0] for item in oracle.items}
        for asked in (("A", "x"), ("B", "z", "2")):
            assert queue.has(asked) == any(item[1][: len(asked)] == asked for item in oracle.items)


def drained(queue: FairQueue[str]) -> Iterator[str]:
    while (item := queue.first()) is not None:
        queue.take(item)
        yield item


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 9)), min_size=1, max_size=40), st.integers(0, 10))
def test_in_order_predicts_the_order_of_service(items: list[tuple[str, int]], served: int) -> None:
    queue = FairQueue[str]()
    for number, (client, cost) in enumerate(items):
        queue.put(f"{number}", ("A", client), cost)
    for item, _ in zip(drained(queue), range(min(served, len(items) - 1)), strict=False):
        assert item not in queue
    if queue:
        predicted = list(queue.in_order("A"))
        assert len(predicted) == len(queue)
        assert predicted == list(drained(queue))


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), min_size=5, max_size=60))
def test_clients_that_always_wait_get_equal_service_to_within_their_largest_items(
    costs: list[tuple[int, int, int]],
) -> None:
    queue, cost_of = FairQueue[str](), {}
    for number, of_clients in enumerate(costs):
        for client, cost in zip("xyz", of_clients, strict=True):
            cost_of[f"{client}{number}"] = cost
            queue.put(f"{client}{number}", ("A", client), cost)
    had: Counter[str] = Counter(x=0, y=0, z=0)
    largest = {client: max(of_clients) for client, of_clients in zip("xyz", zip(*costs, strict=True), strict=True)}
    for item in drained(queue):
        had[item[0]] += cost_of[item]
        if not all(queue.has(("A", client)) for client in "xyz"):
            break
        for one, other in ("xy", "yz", "xz"):  # Goyal et al., theorem 1
            assert abs(had[one] - had[other]) <= largest[one] + largest[other]


@pytest.mark.parametrize("served", [0, 1, 7, 500])
def test_a_new_client_waits_for_at_most_one_item_of_each_other_client(served: int) -> None:
    queue = FairQueue[str]()
    for number in range(1000):
        queue.put(f"many{number}", ("A", "many"), 5)
    for client in range(10):
        for number in range(60):
            queue.put(f"{client}/{number}", ("A", f"{client}"), 7)
    for _ in zip(range(served), drained(queue), strict=False):
        pass
    queue.put("newcomer", ("A", "new"), 1)
    before = []
    for item in drained(queue):
        if item == "newcomer":
            break
        before.append(item.partition("/")[0] if "/" in item else "many")
    assert max(Counter(before).values(), default=0) <= 1


def test_models_take_turns_whatever_their_numbers_of_clients() -> None:
    queue = FairQueue[str]()
    for client in range(50):
        queue.put(f"busy{client}", ("busy", f"{client}"), 4)
    for number in range(10):
        queue.put(f"quiet{number}", ("quiet", "0"), 4)
    first = [item.rstrip("0123456789") for item, _ in zip(drained(queue), range(20), strict=False)]
    assert Counter(first) == {"busy": 10, "quiet": 10}


def test_an_endless_series_of_new_clients_does_not_starve_a_waiting_one() -> None:
    queue = FairQueue[str]()
    queue.put("first of old", ("A", "old"), 100)
    queue.put("second of old", ("A", "old"), 100)
    taken = []
    for number in range(300):
        queue.put(f"{number}", ("A", f"client {number}"), 1)
        queue.put(f"{number} again", ("A", f"other client {number}"), 1)
        item = queue.first()
        assert item is not None
        queue.take(item)
        taken.append(item)
        if item == "second of old":
            break
    # With more and more clients, the clock advances by 1/(clients + 1) for each item: slowly, but it advances.
    assert "first of old" in taken[:2]
    for number, item in enumerate(drained(queue)):
        if item == "second of old":
            assert number < 600
            break
    else:
        raise AssertionError("the second item was never served")


def test_a_client_that_sends_again_as_soon_as_it_is_answered_gets_only_its_share() -> None:
    queue = FairQueue[str]()
    for number in range(100):
        queue.put(f"patient{number}", ("A", "patient"), 1)
    had: Counter[str] = Counter()
    queue.put("eager", ("A", "eager"), 6)
    while had["patient"] < 60:
        item = queue.first()
        assert item is not None
        queue.take(item)
        had[item.rstrip("0123456789")] += 6 if item == "eager" else 1
        if item == "eager":
            queue.put("eager", ("A", "eager"), 6)
    assert abs(had["eager"] - had["patient"]) <= 7


def test_no_state_is_kept_of_clients_without_waiting_items() -> None:
    queue = FairQueue[str]()
    empty, largest = len(pickle.dumps(queue)), 0
    for number in range(20_000):  # one always waits, so that the queue is never empty
        queue.put(f"{number}", ("A", f"client {number}"), 1 + number % 7)
        if number:
            item = queue.first()
            assert item is not None
            queue.take(item)
        if number % 100 == 0:
            largest = max(largest, len(pickle.dumps(queue)))
    assert largest < empty + 2000  # bytes, of the two that wait and of those that have just left
    for _ in drained(queue):
        pass
    assert len(pickle.dumps(queue)) == empty


def test_connections_share_what_their_client_gets() -> None:
    """However many connections a client opens, another client gets as much as all of them together."""
    queue = FairQueue[str]()
    for connection in range(30):
        for number in range(3):
            queue.put(f"many{connection}.{number}", ("A", "many", f"{connection}"), 5)
    for number in range(40):
        queue.put(f"one{number}", ("A", "one", "0"), 5)
    first = [item for item, _ in zip(drained(queue), range(60), strict=False)]
    assert Counter(item[:3] for item in first) == {"man": 30, "one": 30}
    served = Counter(item.partition(".")[0] for item in first if item.startswith("many"))
    assert {*served.values()} == {1}, "and its connections take turns"


def test_costs_beyond_the_precision_of_floats_do_no_harm() -> None:
    queue = FairQueue[str]()
    for item, cost in (("y1", 1.0), ("y2", 4e20), ("y3", 1.0), ("x1", 1e20)):
        queue.put(item, ("A", item[0]), cost)
    queue.take("x1")  # x leaves, ahead of the others,
    queue.put("x2", ("A", "x"), 1.0)  # and comes back before they have caught up
    assert list(drained(queue)) == ["y1", "y2", "x2", "y3"]
