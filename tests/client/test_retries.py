"""What is retried, and when: the policy alone, then both clients against a scripted server."""

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from prelunet.evaluator.client import Client, RetryPolicy
from prelunet.evaluator.client.calls import Attempts, RetryBudget
from prelunet.evaluator.client.channel import CHANNEL_OPTIONS
from prelunet.evaluator.errors import (
    DeadlinePassed,
    DeviceLost,
    EnvironmentFault,
    ImageError,
    Interrupted,
    ModelNotFound,
    NotReady,
    OutOfMemory,
    Overloaded,
    PreluNetError,
    UsageError,
)
from tests.client.client_harness import AT_ONCE, QUICK, Relay, ScriptedServicer, served, text_of

TRANSIENT = EnvironmentFault("gone for a moment")
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
CANCELLED = grpc.StatusCode.CANCELLED


def attempts(
    retries: RetryPolicy, deadline: float | None = None, budget: RetryBudget | None = None, draw=max
) -> Attempts:
    """Return attempts whose waits have the maximum length."""
    return Attempts(retries, budget or RetryBudget(retries), deadline, draw)


def pauses(of: Attempts, error: PreluNetError = TRANSIENT) -> list[float | None]:
    """Return the wait after each attempt, up to the first that has none."""
    found: list[float | None] = []
    while not found or found[-1] is not None:
        of.begin()
        found.append(of.pause(error))
    return found


def test_the_maximum_wait_doubles_up_to_its_limit_until_the_attempts_are_used_up() -> None:
    assert pauses(attempts(RetryPolicy(attempts=6, initial_backoff=0.5, max_backoff=3))) == [0.5, 1, 2, 3, 3, None]
    assert pauses(attempts(RetryPolicy.none())) == [None]
    assert pauses(attempts(RetryPolicy(attempts=5000, initial_backoff=0.5, max_backoff=1, retry_budget=5000)))[
        4998:
    ] == [1, None]


def test_a_wait_is_drawn_between_zero_and_the_maximum() -> None:
    asked = []

    def draw(low: float, high: float) -> float:
        asked.append((low, high))
        return 0.75 * high

    assert pauses(attempts(RetryPolicy(attempts=3, initial_backoff=1, max_backoff=9), draw=draw)) == [0.75, 1.5, None]
    assert asked == [(0, 1), (0, 2)]
    drawn = {
        Attempts(RetryPolicy(initial_backoff=1), RetryBudget(RetryPolicy()), None).pause(TRANSIENT) for _ in range(20)
    }
    assert len(drawn) > 15, "otherwise all clients would return at the same moment"


def test_the_wait_requested_by_an_overloaded_server_is_added() -> None:
    retries = RetryPolicy(attempts=3, initial_backoff=0.5, max_backoff=3)
    assert pauses(attempts(retries), Overloaded("full", retry_after=7)) == [7.5, 8, None]
    assert pauses(attempts(retries), Overloaded("full")) == [0.5, 1, None]


def test_no_attempt_begins_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("prelunet.evaluator.client.calls.time.monotonic", lambda: now[0])
    of = attempts(RetryPolicy(attempts=9, initial_backoff=1, max_backoff=9), deadline=103.0)
    assert of.begin() == 3
    assert of.pause(TRANSIENT) == 1
    now[0] = 101
    assert of.begin() == 2
    assert of.pause(TRANSIENT) is None  # 2 s would take it to the deadline itself
    now[0] = 104
    assert of.begin() == 0


def test_a_client_has_its_retry_budget_and_one_more_retry_for_every_few_answers() -> None:
    retries = RetryPolicy(attempts=100, retry_budget=3, answers_per_retry=4)
    budget = RetryBudget(retries)
    assert len(pauses(attempts(retries, budget=budget))) == 3 + 1
    done = attempts(retries, budget=budget)
    for answers, expected in [(3, False), (1, True), (0, False), (8, True), (0, True), (0, False)]:
        for _ in range(answers):
            done.answer_received()
        assert budget.withdraw() is expected
    for _ in range(100):
        done.answer_received()
    assert [budget.withdraw() for _ in range(4)] == [True, True, True, False], (
        "the budget should not grow beyond its limit"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"attempts": 0},
        {"initial_backoff": 0},
        {"initial_backoff": 6},
        {"max_backoff": float("inf")},
        {"max_backoff": float("nan")},
        {"retry_budget": -1},
        {"answers_per_retry": 0},
        {"restart_timeout": -1},
        {"restart_timeout": float("inf")},
        {"restart_timeout": float("nan")},
    ],
)
def test_an_invalid_retry_policy_is_refused(changes: dict) -> None:
    with pytest.raises(UsageError, match="must be"):
        replace(RetryPolicy(), **changes)


@pytest.mark.parametrize(
    "failure",
    [
        UNAVAILABLE,
        AT_ONCE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        TRANSIENT,
        DeviceLost("x"),
        NotReady("x"),
        CANCELLED,
        Interrupted("x"),
    ],
    ids=repr,
)
def test_a_transient_error_is_retried(client_to, failure) -> None:
    server = ScriptedServicer(failure, failure, failure)
    with client_to(server, retries=QUICK) as client:
        assert text_of(client.classify(b"cat")) == "cat"
        assert len(server.seen) == 4
        assert [model.name for model in client.models()] == ["six", "three"]


@pytest.mark.parametrize(
    "failure",
    [
        OutOfMemory("x"),
        UsageError("x"),
        ImageError("x"),
        ModelNotFound("x"),
        DeadlinePassed("x"),
        ZeroDivisionError("x"),
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
    ],
    ids=repr,
)
def test_a_permanent_error_is_not_retried(client_to, failure) -> None:
    server = ScriptedServicer(failure)
    with client_to(server, retries=QUICK) as client, pytest.raises(PreluNetError):
        client.classify(b"cat")
    assert len(server.seen) == 1


def test_the_last_error_is_raised_when_the_attempts_are_used_up(client_to) -> None:
    server = ScriptedServicer(UNAVAILABLE, UNAVAILABLE, UNAVAILABLE, AT_ONCE)
    with client_to(server, retries=QUICK) as client, pytest.raises(Overloaded, match="too much to do") as caught:
        client.classify(b"cat")
    assert len(server.seen) == 4
    assert caught.value.retry_after == 0.001
    assert isinstance(caught.value.__cause__, grpc.RpcError)


def test_nothing_is_retried_without_retries(client_to) -> None:
    server = ScriptedServicer(UNAVAILABLE)
    with client_to(server, retries=RetryPolicy.none()) as client, pytest.raises(EnvironmentFault):
        client.classify(b"cat")
    assert len(server.seen) == 1


def test_the_requested_wait_is_kept_and_the_deadline_covers_all_attempts(client_to) -> None:
    server = ScriptedServicer(Overloaded("full", retry_after=0.4), Overloaded("full", retry_after=0.2))
    with client_to(server, retries=QUICK) as client:
        client.classify(b"cat", timeout=8)
    first, second, third = server.seen
    assert second.when - first.when >= 0.4
    assert third.when - second.when >= 0.2
    assert third.remaining <= 8 - 0.6 + 0.3  # gRPC rounds what it sends


def test_the_error_is_raised_at_once_if_the_wait_would_pass_the_deadline(client_to) -> None:
    server = ScriptedServicer(Overloaded("full", retry_after=60))
    with client_to(server, retries=QUICK) as client, pytest.raises(Overloaded, match="full"):
        client.classify(b"cat", timeout=20)
    assert len(server.seen) == 1


def test_a_call_has_its_own_deadline_or_that_of_its_client_or_none(client_to) -> None:
    server = ScriptedServicer()
    with client_to(server, timeout=17) as client:
        client.classify(b"cat")
        client.classify(b"cat", timeout=23)
        client.classify(b"cat", timeout=None)
        client.models()
        client.models(timeout=23)
        list(client.classify_many([b"cat"]))
        list(client.classify_many([b"cat"], timeout=23))
    forever = float("inf")
    wanted = [17, 23, forever, 17, 17, 17, 23, 23, 23, forever, 23]
    seen = [each.remaining if each.remaining < 10**6 else forever for each in server.seen]
    assert seen == pytest.approx(wanted, abs=3)  # seconds that a busy machine may take


def test_an_answer_that_comes_too_late_ends_in_deadline_passed(client_of) -> None:
    gate = threading.Event()

    def never(request, context):
        gate.wait(30)

    with served(ScriptedServicer(never)) as address, client_of(address, retries=QUICK) as client:
        with pytest.raises(DeadlinePassed, match=f"{address}: no answer in time"):
            client.classify(b"cat", timeout=0.2)
        gate.set()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "soon"])
def test_an_invalid_timeout_is_refused_before_anything_is_sent(client_of, client_to, timeout) -> None:
    server = ScriptedServicer()
    with client_to(server) as client:
        with pytest.raises(UsageError, match="timeout is"):
            client.classify(b"cat", timeout=timeout)
        with pytest.raises(UsageError, match="timeout is"):
            client.classify_many([b"cat"], timeout=timeout)
    with pytest.raises(UsageError, match="timeout is"):
        client_of("127.0.0.1:1", timeout=timeout)
    assert server.seen == []


def test_calls_that_keep_failing_use_up_the_retry_budget_until_answers_arrive(client_to) -> None:
    retries = replace(QUICK, retry_budget=5, answers_per_retry=2)
    server = ScriptedServicer(*[UNAVAILABLE] * 10)
    with client_to(server, retries=retries) as client:
        for expected in (4, 3, 1, 1, 1):  # 3 + 2 retries are in hand, then none
            before = len(server.seen)
            with pytest.raises(EnvironmentFault):
                client.classify(b"cat")
            assert len(server.seen) - before == expected
        client.classify(b"cat")
        client.classify(b"cat")
        server.script.append(UNAVAILABLE)
        assert text_of(client.classify(b"cat")) == "cat"
        server.script.append(UNAVAILABLE)
        with pytest.raises(EnvironmentFault):
            client.classify(b"cat")


def test_all_threads_share_one_retry_budget() -> None:
    server = ScriptedServicer(*[UNAVAILABLE] * 1000)
    with (
        served(server) as address,
        Client(address, retries=replace(QUICK, retry_budget=10)) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        calls = [pool.submit(client.classify, b"cat") for _ in range(40)]
        assert {type(call.exception(60)) for call in calls} == {EnvironmentFault}
    assert len(server.seen) == 40 + 10


class Absence:
    """Counts how often a client found no server. often: set after the sixth time, more than it tries otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.often = threading.Event()
        found, pause = itertools.count(1), Attempts.pause

        def noting(attempts: Attempts, error: PreluNetError, *, absent: bool = False) -> float | None:
            if absent and next(found) == 6:
                self.often.set()
            return pause(attempts, error, absent=absent)

        monkeypatch.setattr(Attempts, "pause", noting)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


# Calls, and their results.
ASKED = {
    "classify": lambda client: text_of(client.classify(b"cat")),
    "models": lambda client: [model.name for model in client.models()],
    "classify_many": lambda client: [(key, text_of(answer)) for key, answer in client.classify_many([b"cat", b"dog"])],
}
WANTED = {"classify": "cat", "models": ["six", "three"], "classify_many": [(0, "cat"), (1, "dog")]}
SHORT = RetryPolicy(attempts=2, initial_backoff=0.01, max_backoff=0.05, retry_budget=0)


@pytest.mark.parametrize("method", ASKED)
def test_a_server_that_starts_late_is_waited_for(client_of, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absence, port = Absence(monkeypatch), free_port()
    with client_of(f"127.0.0.1:{port}", retries=SHORT) as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(ASKED[method], client)
        assert absence.often.wait(30)
        with served(ScriptedServicer(), port):
            assert call.result(30) == WANTED[method]


@pytest.mark.parametrize("method", ASKED)
def test_waiting_for_a_server_that_loads_its_models_costs_neither_attempts_nor_budget(client_to, method: str) -> None:
    server = ScriptedServicer(*[NotReady("the server is loading its models")] * 9)
    with client_to(server, retries=SHORT) as client:
        assert ASKED[method](client) == WANTED[method]
    assert len(server.seen) >= 10


def test_an_absent_server_is_waited_for_until_the_restart_timeout_or_the_deadline(client_of) -> None:
    for restart_timeout, timeout in ((0.3, 60), (60, 0.3)):
        with client_of(f"127.0.0.1:{free_port()}", retries=replace(SHORT, restart_timeout=restart_timeout)) as client:
            begun = time.monotonic()
            with pytest.raises(EnvironmentFault, match="connection refused"):
                client.classify(b"cat", timeout=timeout)
            assert 0.2 < time.monotonic() - begun < 30


def test_waiting_for_a_server_is_logged_once_until_there_is_an_answer(client_of, caplog) -> None:
    loading = [NotReady("the server is loading its models")] * 3
    server = ScriptedServicer(*loading, None, *loading)
    with served(server) as address, client_of(address, retries=SHORT) as client:
        client.classify(b"cat")
        client.classify(b"cat")
    server.script.append(NotReady("the server is loading its models"))
    with served(server) as another, client_of(another, retries=QUICK) as client:
        client.classify(b"cat")  # an attempt like any other: nothing is logged
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("prelunet.evaluator.client")]
    assert logged == [f"retrying for up to 20 s: {address}: the server is loading its models"] * 2


def test_the_waits_for_an_absent_server_grow_to_their_maximum_and_fit_into_the_time_left(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("prelunet.evaluator.client.calls.time.monotonic", lambda: now[0])

    def waits(of: Attempts) -> list[float]:
        found = []
        while True:
            of.begin()
            pause = of.pause(TRANSIENT, absent=True)
            if pause is None:
                return found
            found.append(pause)
            now[0] += pause

    unit = 1 / 16  # seconds; exact as a float
    rule = RetryPolicy(
        attempts=1, initial_backoff=unit, max_backoff=4 * unit, retry_budget=0, restart_timeout=21 * unit
    )
    # At last half of 6, 3 and 1.5 units; then less than `initial_backoff` is left.
    assert [pause / unit for pause in waits(attempts(rule))] == [1, 2, 4, 4, 4, 3, 1.5, 0.75]
    assert [pause / unit for pause in waits(attempts(rule, deadline=now[0] + 6 * unit))] == [1, 2, 1.5, 0.75]
    asking = NotReady("loading")
    asking.retry_after = 5  # type: ignore[attr-defined]
    assert attempts(replace(rule, restart_timeout=21)).pause(asking, absent=True) == 5 + unit
    assert max(waits(attempts(RetryPolicy()))) == 0.3, "whatever the backoff of other failures: it may be back"


def test_an_absence_costs_no_attempt_and_restarts_after_any_other_failure_or_an_answer(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("prelunet.evaluator.client.calls.time.monotonic", lambda: now[0])
    of = attempts(RetryPolicy(attempts=3, initial_backoff=0.125, max_backoff=0.25, restart_timeout=10))
    pauses = []
    for absent in (True, True, False, True, True, False, False):
        of.begin()
        pauses.append(of.pause(TRANSIENT, absent=absent))
        now[0] += 4
    assert pauses == [0.125, 0.25, 0.125, 0.125, 0.25, 0.25, None]
    of = attempts(RetryPolicy(initial_backoff=0.125, max_backoff=4, restart_timeout=10))
    assert of.pause(TRANSIENT, absent=True) == 0.125
    now[0] += 60
    of.answer_received()  # a stream may be answered for long in between
    assert of.pause(TRANSIENT, absent=True) == 0.125


def test_a_call_whose_connection_is_reset_is_retried(client_of) -> None:
    arrived, gate = threading.Event(), threading.Event()

    def hold(request, context):
        arrived.set()
        gate.wait(30)

    server = ScriptedServicer(hold)
    with (
        served(server) as address,
        Relay(address) as relay,
        client_of(relay.address, retries=replace(QUICK, max_backoff=0.2, attempts=50)) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(client.classify, b"cat")
        assert arrived.wait(30)
        relay.cut()
        assert text_of(call.result(30)) == "cat"
        gate.set()
    assert len(server.seen) == 2


def test_a_call_to_a_machine_that_vanished_is_retried_even_without_a_deadline(
    client_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, gate = threading.Event(), threading.Event()
    pings = [(name, 200 if "keepalive" in name or "ping_timeout" in name else value) for name, value in CHANNEL_OPTIONS]
    assert sorted(value for name, value in CHANNEL_OPTIONS if (name, value) not in pings) == [10_000, 10_000, 30_000]
    monkeypatch.setattr("prelunet.evaluator.client.aio.CHANNEL_OPTIONS", pings)

    def hold(request, context):
        arrived.set()
        gate.wait(30)

    server = ScriptedServicer(hold)
    retries = replace(QUICK, max_backoff=0.2, attempts=500, retry_budget=500)
    with (
        served(server) as address,
        Relay(address) as relay,
        client_of(relay.address, retries=retries, timeout=None) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(client.classify, b"cat")
        assert arrived.wait(30)
        relay.freeze()
        assert text_of(call.result(30)) == "cat"
        gate.set()


def test_a_machine_without_a_server_is_an_environment_fault_after_the_attempts(client_of) -> None:
    with socket.socket() as free:  # bound, but nobody accepts
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with (
            client_of(address, retries=QUICK) as client,
            pytest.raises(EnvironmentFault, match=f"{address}: .*prelunet serve --model"),
        ):
            client.classify(b"cat")


def test_calls_take_turns_among_the_servers_of_a_name_and_continue_when_one_stops(client_of) -> None:
    first, second = ScriptedServicer(), ScriptedServicer()
    with served(first) as one, served(second) as two, client_of(f"ipv4:{one},{two}", retries=QUICK) as client:
        while not (first.seen and second.seen):  # until both are connected
            client.classify(b"cat")
        before = len(first.seen), len(second.seen)
        for _ in range(20):
            client.classify(b"cat")
        assert (len(first.seen), len(second.seen)) == (before[0] + 10, before[1] + 10)
        second.script.extend([UNAVAILABLE] * 20)
        for _ in range(6):
            assert text_of(client.classify(b"cat")) == "cat"
