"""JSON from outside is parsed strictly and checked."""

import json
import os
from dataclasses import dataclass
from typing import Any

import pytest

from prelunet.evaluator.json_checks import (
    parse_json,
    read_stored,
    require_int,
    require_same,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize("value", [None, True, -3, 0.25, 1e300, "naïve \u2028", "😀", [1, {"a": []}], {"é": None}])
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
        (r'"\ud800"', "a lone surrogate"),
        (r'{"\uDFFF": 1}', "a lone surrogate"),
        (rb'[{"a": ["b", "\udc00\ud83d"]}]', "a lone surrogate"),
    ],
)
def test_invalid_json_is_refused(data: str | bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_json(data)


def test_names_of_files_may_hold_bytes_that_are_not_utf_8() -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    assert parse_json(json.dumps({name: [name]}), file_names=True) == {name: [name]}
    with pytest.raises(ValueError, match="a lone surrogate"):
        parse_json(r'"\ud800.jpg"', file_names=True)  # no name: it stands for no byte


def test_a_bool_is_not_a_number() -> None:
    for value in (True, 1.0, "1", None, [1]):
        with pytest.raises(ValueError, match="step should be a whole number from 0 to 9, not "):
            require_int(value, "step", 0, 9)
    assert require_int(9, "step", 0, 9) == 9


def test_a_huge_value_is_abbreviated_in_the_error() -> None:
    for value in (10**5000, "x" * 5000, nested(900)):
        with pytest.raises(ValueError, match="not ") as caught:
            require_int(value, "step", 0, 9)
        assert len(str(caught.value)) < 120


@dataclass(frozen=True)
class Declared:
    """An object of a file, with a key that has a default."""

    sides: tuple[int, ...]
    gray: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"sides": list(self.sides), "gray": self.gray}


def test_a_declared_object_is_read_only_if_it_writes_itself_back_equal() -> None:
    assert read_stored({"gray": True, "sides": [1, 2]}, Declared) == Declared((1, 2), gray=True)
    for data, fault in (
        ({"sides": [1]}, "no key 'gray'"),
        ({"sides": [1], "gray": False, "x\x1b": 1}, r"unknown key 'x\\x1b'"),
        ({"sides": [1, True], "gray": False}, r"Expected `int`, got `bool` - at `\$.sides\[1\]`"),
        ([], "Expected `object`, got `array`"),
    ):
        with pytest.raises(ValueError, match=fault):
            read_stored(data, Declared)


def test_of_two_objects_the_first_key_that_differs_is_named() -> None:
    require_same({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    with pytest.raises(ValueError, match="'b' is \"x\", but should be a list"):
        require_same({"a": 1, "b": "x"}, {"a": 1, "b": [2]})
    with pytest.raises(ValueError, match=r"'b\.c' is true, but should be \"d\""):
        require_same({"a": 1, "b": {"c": True}}, {"a": 1, "b": {"c": "d"}})
    with pytest.raises(ValueError, match=r"unknown key 'b\.e'"):
        require_same({"b": {"c": 1, "e": 2}}, {"b": {"c": 1}})
