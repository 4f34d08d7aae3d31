"""JSON from outside is parsed strictly and checked."""

import json
from typing import Any

import pytest

from prelunet.evaluator.json_checks import (
    MAX_DEPTH,
    check_plain,
    parse_json,
    require_bool,
    require_int,
    require_keys,
    require_str,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize("value", [None, True, -3, 0.25, 1e300, "naïve \u2028", [1, {"a": []}], {"é": None}])
def test_json_reads_back_as_it_was_written(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ("[1, NaN]", "NaN is not a finite number"),
        ("-Infinity", "-Infinity is not a finite number"),
        ('{"a": 1e999}', "1e999 is not a finite number"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff\xfe[]", "codec can't decode"),
        ("1" * 10_000, "digits"),
        ("", "Expecting value"),
        ('{"a": 1, "b": {"c": 1, "d": 2, "c": 1}}', "the key 'c' occurs more than once in one object"),
        ("{} {}", "Extra data"),
    ],
)
def test_invalid_json_is_refused(data: str | bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_json(data)


def test_deep_nesting_and_lone_surrogates_are_refused() -> None:
    check_plain(nested(MAX_DEPTH - 1))
    check_plain({"😀": ["é"]})
    with pytest.raises(ValueError, match="nested too deeply"):
        check_plain(nested(MAX_DEPTH))
    for value in ("\ud800", ["a", "\udfff"], {"\ud800": 1}, {"a": {"b": "\ud800"}}):
        with pytest.raises(ValueError, match="a lone surrogate"):
            check_plain(value)


def test_a_bool_is_not_a_number_and_a_number_not_a_bool() -> None:
    for value in (True, 1.0, "1", None, [1]):
        with pytest.raises(ValueError, match="step should be a whole number from 0 to 9, not "):
            require_int(value, "step", 0, 9)
    for value in (0, 1, None, "true"):
        with pytest.raises(ValueError, match="capped should be true or false"):
            require_bool(value, "capped")
    assert require_int(9, "step", 0, 9) == 9
    assert require_bool(False, "capped") is False


def test_a_huge_value_is_abbreviated_in_the_error() -> None:
    for value in (10**5000, "x" * 5000, nested(900)):
        with pytest.raises(ValueError, match="not ") as caught:
            require_int(value, "step", 0, 9)
        assert len(str(caught.value)) < 120
    assert require_str("x" * 5000, "name") == "x" * 5000


def test_an_object_has_exactly_the_required_keys() -> None:
    assert require_keys({"a": 1, "b": 2}, "it", {"b", "a"}) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="it lacks 'b', has an unknown key 'c'"):
        require_keys({"a": 1, "c": 2}, "it", {"a", "b"})
    with pytest.raises(ValueError, match="it should be an object, not a list"):
        require_keys([], "it", {"a"})
