"""The retry delay of refused callers, which depends on the throughput of answers."""

import random

import pytest

from prelunet.evaluator.errors import Overloaded
from prelunet.evaluator.serving.scheduling import admission as admission_module
from prelunet.evaluator.serving.scheduling.admission import ThroughputEstimate
from tests.serving.scheduling.scheduler_harness import admitted, build_admission


def test_requests_refused_together_get_different_retry_delays() -> None:
    admission, _ = build_admission(max_views=1)
    delays = set()
    with admitted(admission, 1, 1):
        for _ in range(20):
            with pytest.raises(Overloaded) as refusal, admitted(admission, 1, 1):
                pass
            delays.add(refusal.value.retry_after)
    assert len(delays) > 10
    assert (
        0.5 * admission_module.DEFAULT_RETRY_AFTER
        <= min(delays)
        <= max(delays)
        <= 1.5 * admission_module.DEFAULT_RETRY_AFTER
    )


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_throughput_is_that_of_answers_while_images_are_unanswered() -> None:
    clock = Clock()
    throughput = ThroughputEstimate(clock)
    assert throughput.seconds(10) is None
    throughput.begin()
    clock.now += 3
    throughput.record_departure(2)
    assert throughput.seconds(1) == pytest.approx(1.5)
    clock.now += 100  # nothing waits
    throughput.begin()
    clock.now += 1
    throughput.record_departure(2)
    assert throughput.seconds(4) == pytest.approx(4, rel=0.01), "4 views in 4 s, old ones count a little less"
    clock.now += 5
    throughput.record_departure(0)  # not answered: its time counts, its views do not
    assert throughput.seconds(4) == pytest.approx(9, rel=0.01), "4 views in 9 s"


def test_old_measurements_of_the_throughput_are_forgotten() -> None:
    clock = Clock()
    throughput = ThroughputEstimate(clock)
    throughput.begin()
    for seconds in (50.0, 0.1):
        for _ in range(300):
            clock.now += 10 * seconds
            throughput.record_departure(10)
    assert throughput.seconds(1) == pytest.approx(0.1, rel=0.01)  # of 50 s a view, (246/256)^300 is left


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, admission_module.DEFAULT_RETRY_AFTER),
        (0.0001, admission_module.MIN_RETRY_AFTER),
        (2.0, 6.0),
        (1000.0, admission_module.MAX_RETRY_AFTER),
    ],
)
def test_the_retry_delay_is_the_expected_time_of_the_unanswered_views(
    seconds: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)
    admission, _ = build_admission(max_views=3)
    clock = admission._throughput._clock = Clock()
    if seconds is not None:
        with admitted(admission, 1, 1):
            clock.now += seconds
    with admitted(admission, 1, 3), pytest.raises(Overloaded) as refusal, admitted(admission, 1, 1):
        pass
    assert refusal.value.retry_after == pytest.approx(expected)
