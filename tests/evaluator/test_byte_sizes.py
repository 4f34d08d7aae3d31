import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.machine import format_bytes, parse_memory

G = 2**30


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6G", 6 * 2**30),
        ("500M", 500 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("6GB", 6 * 10**9),
        ("900MB", 900 * 10**6),
        ("2T", 2**41),
        (None, None),
    ],
)
def test_amounts_of_memory_are_read(text: str | None, value: int | None) -> None:
    assert parse_memory(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "6", "G", "6gb", "6Gb", "6 G", "-6G", "+6G", "1e3M", "6.G", "0G", "0.0000001M", "9999999T", "6G\n", "٦G"],
)
def test_text_that_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="with its unit"):
        parse_memory(text)


@given(st.integers(2**20, 2**45))
@example(int(9.995 * G))
@example(int(99.95 * G))
def test_an_amount_is_printed_to_three_digits_and_never_too_low(value: int) -> None:
    printed = parse_memory(format_bytes(value)) or 0
    assert value <= printed <= 1.011 * value  # 1.01 after 1.00…1
    assert len(format_bytes(value)) <= 5
