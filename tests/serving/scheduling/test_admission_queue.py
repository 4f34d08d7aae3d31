"""Admission control of a model: who is admitted, refused or waits, and that nothing is left afterwards."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelunet.evaluator.errors import ImageError, Overloaded, UsageError
from prelunet.evaluator.serving.data_plane import DataPlane
from prelunet.evaluator.serving.observability.call_context import Call
from prelunet.evaluator.serving.scheduling.admission import AdmissionController, Ticket, Usage
from prelunet.evaluator.serving.scheduling.model import RequestOptions
from tests.helpers.fakes import FakeSession
from tests.serving.event_loop import async_test, settled, until
from tests.serving.scheduling.scheduler_harness import admitted, admitted_later, build_admission, call_of, serve_models
from tests.serving.serving_harness import png


def test_images_beyond_the_limit_of_bytes_are_refused_but_not_an_image_alone() -> None:
    admission, metrics = build_admission(max_bytes=1000)
    with admitted(admission, 5000, 2):
        assert metrics.registry.get_sample_value("prelunet_waiting_bytes", {"model": "fake"}) == 1000
        with (
            pytest.raises(Overloaded, match=r"2 unanswered views \(1000 bytes\)"),
            admitted(admission, 1, 1),
        ):
            pass
        with admitted(admission, 200, 1, call_of("another")):
            pass  # the reserve is left
    with admitted(admission, 600, 1), admitted(admission, 400, 1):
        pass
    with (
        admitted(admission, 600, 1),
        pytest.raises(Overloaded, match=r"1 unanswered views \(600 bytes\)"),
        admitted(admission, 401, 1),
    ):
        pass
    assert admission.used == Usage()
    refusals = metrics.registry.get_sample_value("prelunet_refusals_total", {"model": "fake", "reason": "bytes"})
    assert refusals == 2


def test_an_image_with_more_views_than_the_limit_is_admitted_alone() -> None:
    admission, _ = build_admission(max_views=3)
    with (
        admitted(admission, 1, 60),
        pytest.raises(Overloaded, match=r"60 unanswered views \(1 bytes\)"),
        admitted(admission, 1, 1),
    ):
        pass
    with admitted(admission, 1, 2), admitted(admission, 1, 1):
        assert admission.used.views == 3


def enter(admission: AdmissionController, stack: ExitStack, client: str, images: int, views: int = 1) -> int:
    """Try to admit this many images of a client; return how many were admitted."""
    for number in range(images):
        try:
            stack.enter_context(admitted(admission, 10, views, call_of(client)))
        except Overloaded:
            return number
    return images


def test_a_client_that_reaches_the_limit_does_not_lock_out_others() -> None:
    admission, _ = build_admission(max_views=40)
    with ExitStack() as stack:
        assert enter(admission, stack, "greedy", 100) == 40
        assert enter(admission, stack, "small", 3) == 3
        assert enter(admission, stack, "greedy", 1) == 0, "it has more than its share"
        assert enter(admission, stack, "small", 100) == 10 - 3, "1.25 times the limit, and no more"
        assert enter(admission, stack, "another", 1) == 0
    assert admission.used == Usage()
    with ExitStack() as stack:
        assert enter(admission, stack, "small", 100) == 40, "clients that have left are forgotten"


def test_a_new_client_gets_its_share_among_many() -> None:
    admission, _ = build_admission(max_views=40)
    with ExitStack() as stack:
        for client in range(8):
            assert enter(admission, stack, str(client), 5) == 5
        assert enter(admission, stack, "0", 1) == 0
        assert enter(admission, stack, "ninth", 100) == 4, "a ninth of 40"


def test_an_identity_gets_no_more_than_its_share_and_one_image_alone_always_fits() -> None:
    admission, metrics = build_admission(max_views=40, max_bytes=1000)
    with ExitStack() as stack:
        stack.enter_context(admitted(admission, 10, 1, call_of("another")))
        half = call_of("half", identity="token:half", share=0.5)
        for connection in ("1", "2"):  # an identity is one, whatever its connections
            stack.enter_context(admitted(admission, 10, 10, call_of(connection, identity="token:half", share=0.5)))
        with pytest.raises(Overloaded, match="the limit is the share of this token"):
            stack.enter_context(admitted(admission, 10, 1, half))
        assert enter(admission, stack, "another", 5) == 5, "there is room for others"
    with ExitStack() as stack:
        stack.enter_context(admitted(admission, 10, 1, call_of("another")))
        stack.enter_context(admitted(admission, 10, 30, half))
        with pytest.raises(Overloaded):
            stack.enter_context(admitted(admission, 1, 1, half))
    refusals = metrics.registry.get_sample_value("prelunet_refusals_total", {"model": "fake", "reason": "share"})
    assert refusals == 2


def test_several_images_beyond_the_share_of_a_token_are_refused_for_good() -> None:
    admission, _ = build_admission(max_views=40, max_bytes=1000)
    half = call_of("half", identity="token:half", share=0.5)
    with ExitStack() as stack:
        stack.enter_context(admitted(admission, 1, 10, call_of("another")))
        with pytest.raises(UsageError, match=r"7 images with 21 views and 1 bytes .* share, 0\.5 of 40 and 1000\."):
            admission.admit_or_refuse(Ticket(half, 1, 21, images=7))
        with pytest.raises(UsageError, match="7 images with 7 views and 501 bytes"):
            admission.admit_or_refuse(Ticket(half, 501, 7, images=7))
        admission.admit_or_refuse(Ticket(half, 1, 18, images=6))
        with pytest.raises(Overloaded, match="the limit is the share of this token"):
            admission.admit_or_refuse(Ticket(half, 1, 6, images=2))


def test_who_waits_for_the_own_share_holds_up_nobody_else() -> None:
    async def scenario(driver: AdmissionDriver) -> None:
        driver.shares["a"] = 0.25
        await driver.come("a0", "a1", "a2", "b0", "b1")
        assert driver.inside == ["a0", "a1", "b0", "b1"]
        with admitted(driver.admission, 10, 1, call_of("c")):
            pass
        await driver.leave("a0")
        assert driver.inside[4:] == ["a2"]

    with_driver(scenario, max_views=8)


@async_test
async def test_waiting_requests_are_admitted_in_order_as_others_leave_and_not_counted_as_refused() -> None:
    admission, metrics = build_admission(max_views=4)
    inside: list[int] = []
    leave = [asyncio.Event() for _ in range(8)]

    async def hold(number: int) -> None:
        async with admitted_later(admission, 10, 2, call_of("one")):
            inside.append(number)
            await leave[number].wait()

    tasks = [asyncio.create_task(hold(number)) for number in range(8)]
    await until(lambda: len(inside) == 2)
    tasks[2].cancel()
    await asyncio.sleep(0)
    leave[1].set()
    await until(lambda: len(inside) == 3)
    assert inside == [0, 1, 3], "in order of arrival"
    for event in leave:
        event.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert inside == [0, 1, 3, 4, 5, 6, 7]
    assert admission.used == Usage()
    assert metrics.registry.get_sample_value("prelunet_refusals_total", {"model": "fake", "reason": "views"}) in {
        None, 0,
    }  # fmt: skip


@pytest.mark.parametrize("error", [ImageError("x"), asyncio.CancelledError()])
@async_test
async def test_a_request_leaves_admission_whatever_its_error(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with serve_models(fake=FakeSession()) as models:
        with pytest.raises(type(error)):
            await DataPlane(models).classify(png(28, 28), "fake", RequestOptions(), Call(), on_admitted=fail)
        assert models.get("fake").admission.used == Usage()


def client_of(name: str) -> str:
    """Return the client of a request: the first letter of its name, with a port if there is one, as in b:1."""
    return name[:3] if ":" in name else name[0]


class AdmissionDriver:
    """Requests for admission, each in its own task; a name begins with its client, see `client_of`.

    inside: names in the order of admission; refused: in the order of refusal; shares: by the first letter of a name.
    """

    def __init__(self, admission: AdmissionController) -> None:
        self.admission = admission
        self.shares: dict[str, float] = {}
        self.inside: list[str] = []
        self.refused: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    async def come(self, *names: str, views: int = 1, size: int = 10) -> None:
        for name in names:
            self.start(name, views, size)
            await settled(10)

    def start(self, name: str, views: int = 1, size: int = 10) -> None:
        """Start the task of a request, which comes once the running one pauses."""
        self._leave[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._hold(name, size, views))

    async def _hold(self, name: str, size: int, views: int) -> None:
        try:
            async with admitted_later(
                self.admission, size, views, call_of(client_of(name), share=self.shares.get(name[0]))
            ):
                self.inside.append(name)
                await self._leave[name].wait()
        except Overloaded:
            self.refused.append(name)

    async def leave(self, *names: str) -> None:
        for name in names:
            self._leave[name].set()
        await settled(10)

    def cancel(self, name: str) -> None:
        self._tasks[name].cancel()

    async def all_leave(self) -> None:
        await self.leave(*self._leave)
        async with asyncio.timeout(10):
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        assert self.admission.used == Usage()
        assert self.admission.waiters == {}


def with_driver(scenario: Callable[[AdmissionDriver], Awaitable[None]], **queue: int) -> None:
    """Run a scenario; afterwards nothing is held, and all requests were admitted unless cancelled."""

    async def run() -> None:
        admission, metrics = build_admission(**queue)
        driver = AdmissionDriver(admission)
        await scenario(driver)
        await driver.all_leave()
        for gauge in ("images", "views", "bytes"):
            assert metrics.registry.get_sample_value(f"prelunet_waiting_{gauge}", {"model": "fake"}) == 0

    asyncio.run(run())


def test_a_waiting_client_does_not_block_another() -> None:
    async def scenario(driver: AdmissionDriver) -> None:
        await driver.come("a0", "a1", "a2", "a3", "a4", "b0", "b1")
        assert driver.inside == ["a0", "a1", "a2", "a3", "b0"], "b uses the reserve"
        await driver.leave("a0")
        assert driver.inside[5:] == ["b1"], "it has one of five inside, less than half of four; a has three"

    with_driver(scenario, max_views=4)


@pytest.mark.parametrize("clients", [("a:1", "b:1"), ("a:1", "a:2")], ids=["of two addresses", "of one address"])
def test_where_too_many_bytes_wait_the_latest_of_the_client_with_the_most_are_refused(clients: tuple[str, str]) -> None:
    async def scenario(driver: AdmissionDriver) -> None:
        many, few = clients
        await driver.come("z:1-inside")
        await driver.come(*(f"{many}-{number}" for number in range(4)), size=120)
        assert driver.refused == [], "480 of 500 bytes wait"
        await driver.come(f"{few}-0", size=100)
        assert driver.refused == [f"{many}-3"]
        await driver.come(f"{many}-4", size=300)
        assert driver.refused[1:] == [f"{many}-4"]
        await driver.come(f"{many}-5", size=20)
        assert driver.refused[2:] == []
        await driver.leave(*driver.inside)
        await driver.leave(f"{many}-0", f"{many}-1", f"{many}-2", f"{many}-5", f"{few}-0")
        assert len(driver.inside) == 6
        await driver.come("z:1-again")
        await driver.come("z:2-large", size=5000)
        await driver.leave("z:1-again")
        assert driver.inside[-1] == "z:2-large", "one that waits alone is never refused"

    with_driver(scenario, max_views=1, max_bytes=1000)


def test_the_images_of_a_client_that_has_just_left_are_not_refused_in_the_place_of_others() -> None:
    async def scenario(driver: AdmissionDriver) -> None:
        await driver.come("z:1-inside")
        await driver.come("a:1-0", "a:1-1", size=240)
        driver.start("b:1-0", size=100)  # comes before the tasks of those images end
        driver.cancel("a:1-0")
        driver.cancel("a:1-1")
        await settled(10)
        assert (driver.refused, len(driver.admission.waiters)) == ([], 1)

    with_driver(scenario, max_views=1, max_bytes=1000)


def test_a_request_that_has_just_been_cancelled_holds_up_nobody() -> None:
    async def scenario(driver: AdmissionDriver) -> None:
        await driver.come("a0", "a1", "b0")
        await driver.come("a2", views=9)
        with pytest.raises(Overloaded), admitted(driver.admission, 10, 1, call_of("a")):
            pass
        driver.cancel("a2")
        with admitted(driver.admission, 10, 1, call_of("a")):  # before the task of a2 ends
            assert driver.admission.used.views == 4

    with_driver(scenario, max_views=4)


def test_requests_of_one_client_are_admitted_in_order_even_if_only_a_later_one_fits() -> None:
    async def scenario(driver: AdmissionDriver) -> None:
        await driver.come("a0", views=8)
        await driver.come("a1", views=5)
        await driver.come("a2", views=1)
        assert driver.inside == ["a0"]
        await driver.leave("a0")
        assert driver.inside == ["a0", "a1", "a2"]

    with_driver(scenario, max_views=10)


def test_a_call_that_does_not_wait_does_not_take_the_room_of_a_waiting_request() -> None:
    async def scenario(driver: AdmissionDriver) -> None:
        await driver.come("a0", views=9)
        await driver.come("b0", views=5)
        await driver.come("a1", views=9)
        with pytest.raises(Overloaded), admitted(driver.admission, 10, 3, call_of("a")):  # it would fit into 20
            pass
        with admitted(driver.admission, 10, 3, call_of("b")):  # it has less than its share
            pass
        assert driver.inside == ["a0", "b0"]
        await driver.leave("b0")
        assert driver.inside == ["a0", "b0", "a1"]

    with_driver(scenario, max_views=20)


def test_a_client_with_its_share_does_not_take_the_room_of_a_waiting_request() -> None:
    async def scenario(driver: AdmissionDriver) -> None:
        await driver.come("a0", "b0", "a1", views=9)
        await driver.come("b1", views=2)
        assert driver.inside == ["a0", "b0"], "b1 would fit, beside b0 it is more than half of 20"
        await driver.leave("a0")
        assert driver.inside == ["a0", "b0", "a1", "b1"]

    with_driver(scenario, max_views=20)


def test_large_images_are_admitted_despite_an_endless_series_of_small_ones() -> None:
    """In a plain queue a1 would wait forever: each of the others repeatedly has less than its share."""

    async def scenario(driver: AdmissionDriver) -> None:
        others = "bcdef"
        await driver.come(*(f"{client}{number}" for number in range(21) for client in others))
        assert (driver.admission.used.images, len(driver.admission.waiters)) == (100, 5)
        await driver.come("a0", "a1", views=20)
        assert driver.inside[100:] == ["a0"]
        for number in range(21, 30):
            for client in others:  # each a stream, one of which waits for admission
                await driver.leave(f"{client}{number - 21}")
                await driver.come(f"{client}{number}")
        assert "f24" in driver.inside
        assert "a1" not in driver.inside
        await driver.leave("a0")
        assert driver.inside[-1] == "a1"

    with_driver(scenario, max_views=100)


def test_a_request_behind_a_cancelled_one_is_admitted() -> None:
    async def scenario(driver: AdmissionDriver) -> None:
        await driver.come("a0", views=6)
        await driver.come("a1", views=9)
        await driver.come("a2", views=4)
        assert driver.inside == ["a0"]
        driver.cancel("a1")
        await settled(10)
        assert driver.inside == ["a0", "a2"]

    with_driver(scenario, max_views=10)


@pytest.mark.parametrize("first", ["let in", "cancelled"])
def test_a_request_admitted_and_cancelled_at_the_same_moment_makes_room_for_the_next(first: str) -> None:
    async def scenario(driver: AdmissionDriver) -> None:
        inside = admitted(driver.admission, 10, 1, call_of("a"))
        inside.__enter__()
        await driver.come("a1", "a2")
        if first == "let in":
            inside.__exit__(None, None, None)
            assert len(driver.admission.waiters) == 1, "a1 is admitted, but its task has not resumed yet"
            driver.cancel("a1")
        else:
            driver.cancel("a1")
            inside.__exit__(None, None, None)
        await settled(10)
        assert driver.inside == ["a2"]
        assert (driver.admission.used.images, driver.admission.waiters) == (1, {})

    with_driver(scenario, max_views=1)


def test_images_of_one_request_are_counted_individually() -> None:
    admission, metrics = build_admission(max_views=40)
    with admitted(admission, 1000, 20, call_of("a"), images=10), admitted(admission, 10, 2, call_of("a")):
        assert (
            metrics.registry.get_sample_value("prelunet_waiting_images", {"model": "fake"})
            == admission.used.images
            == 11
        )
    assert metrics.registry.get_sample_value("prelunet_waiting_images", {"model": "fake"}) == admission.used.images == 0


@dataclass(frozen=True)
class PlainTicket:
    """One request for admission in the reference below."""

    name: str
    size: int
    views: int

    @property
    def client(self) -> str:
        return client_of(self.name)

    @property
    def identity(self) -> str:
        return self.name[0]


@dataclass
class ReferenceAdmission:
    """The same rules over plain lists; all totals are recomputed each time."""

    max_views: int
    max_bytes: int
    share_of_a: float
    inside: list[PlainTicket] = field(default_factory=list)
    line: list[PlainTicket] = field(default_factory=list)

    def above_share(self, who: PlainTicket) -> bool:
        shared = [other for other in (*self.inside, who) if other.identity == who.identity]
        views, size = (sum(getattr(other, unit) for other in shared) for unit in ("views", "size"))
        above = views > self.share_of_a * self.max_views or size > self.share_of_a * self.max_bytes
        return who.identity == "a" and len(shared) > 1 and above

    def first(self, before: list[PlainTicket]) -> bool:
        heads = [who for place, who in enumerate(before) if who.client not in {each.client for each in before[:place]}]
        return all(self.above_share(head) for head in heads)

    def has_room(self, who: PlainTicket, *, first: bool) -> bool:
        if self.above_share(who):
            return False
        everyone = (*self.inside, who)
        shared = [other for other in everyone if other.identity == who.identity]
        own = [other for other in shared if other.client == who.client]
        identities = {other.identity for other in everyone}
        clients = {other.client for other in shared}
        for unit, limit in (("views", self.max_views), ("size", self.max_bytes)):
            total, shared_total, own_total = (
                sum(getattr(other, unit) for other in group) for group in (everyone, shared, own)
            )
            share = limit // len(identities)
            below_share = len(shared) == 1 or shared_total <= share or own_total <= share // len(clients)
            fits = 4 * total <= 5 * limit if below_share else first and total <= limit
            if not fits:
                return not self.inside
        return True

    def let_in(self) -> None:
        for place, who in enumerate(self.line):
            before = self.line[:place]
            its_turn = all(other.client != who.client for other in before)
            if its_turn and self.has_room(who, first=self.first(before)):
                self.line.remove(who)
                self.inside.append(who)
                self.let_in()
                return

    def refuse(self) -> None:
        while len(self.line) > 1 and sum(who.size for who in self.line) > self.max_bytes // 2:

            def held(who: PlainTicket, by: str) -> int:
                return sum(other.size for other in self.line if getattr(other, by) == getattr(who, by))

            places = range(len(self.line))
            del self.line[
                max(places, key=lambda at: (held(self.line[at], "identity"), held(self.line[at], "client"), at))
            ]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "stream", "stream", "stream", "leave", "leave", "cancel"]),
        st.sampled_from(["a:1", "a:1", "a:2", "b:1", "b:2", "c:1"]),
        st.integers(1, 9),
        st.integers(1, 90),
        st.integers(0, 99),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(STEPS, st.integers(1, 20), st.sampled_from([9.0, 0.6, 0.3]))
def test_admission_decides_as_plain_lists_do(
    steps: list[tuple[str, str, int, int, int]], max_views: int, share: float
) -> None:
    """share: of `a`, the only one with a limit of its own; 9: as if it had none."""

    async def scenario(driver: AdmissionDriver) -> None:
        plain, calls = ReferenceAdmission(max_views, 200, share), dict[str, ExitStack]()
        admission, driver.shares = driver.admission, {"a": share}
        for number, (step, client, views, size, chosen) in enumerate(steps):
            who = PlainTicket(f"{client}{number}", size, views)
            if step == "call":
                calls[who.name], refused = ExitStack(), not plain.has_room(who, first=plain.first(plain.line))
                try:
                    caller = call_of(client, share=driver.shares.get(client[0]))
                    calls[who.name].enter_context(admitted(admission, size, views, caller))
                    assert not refused
                    plain.inside.append(who)
                except Overloaded:
                    assert refused
            elif step == "stream":
                plain.line.append(who)
                plain.let_in()
                plain.refuse()
                await driver.come(who.name, views=views, size=size)
            elif step == "leave" and plain.inside:
                leaver = plain.inside.pop(chosen % len(plain.inside))
                calls[leaver.name].close() if leaver.name in calls else await driver.leave(leaver.name)
            elif step == "cancel" and plain.line:
                driver.cancel(plain.line.pop(chosen % len(plain.line)).name)
            plain.let_in()
            await settled(10)
            assert sorted(ticket.views for ticket in admission.waiters) == sorted(who.views for who in plain.line)
            assert admission.used == Usage(
                len(plain.inside), sum(who.views for who in plain.inside), sum(who.size for who in plain.inside)
            )
            assert {who.name for who in plain.inside} <= {*driver.inside, *calls}
            assert not {who.name for who in plain.line} & {*driver.inside}
        for stack in calls.values():
            stack.close()

    with_driver(scenario, max_views=max_views, max_bytes=200)
