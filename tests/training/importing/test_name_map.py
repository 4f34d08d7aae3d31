"""Name maps: the meaning of a line, and invalid maps."""

from pathlib import Path

import pytest

from prelunet.evaluator.errors import UsageError
from prelunet.training.importing.name_map import NameMap, read_name_map


@pytest.mark.parametrize(
    ("lines", "name", "new"),
    [
        ({"a.*": "b.*"}, "a.x", "b.x"),
        ({"a.*": "b.*"}, "a.x.y", "a.x.y"),  # `*` does not match a dot
        ({"a.**": "b.**"}, "a.x.y", "b.x.y"),
        ({"**": "net.**"}, "a.x.y", "net.a.x.y"),
        ({"block*.conv*.*": "conv*_*.*"}, "block12.conv3.bias", "conv12_3.bias"),
        ({"a*c": "x*"}, "abc.d", "abc.d"),  # patterns match whole names
        ({"a.x": "exact", "a.*": "b.*"}, "a.x", "exact"),
        ({"a.*": "b.*", "a.x": "exact"}, "a.x", "exact"),
        ({"a.*": "first.*", "*.x": "second.*"}, "a.x", "first.x"),
        ({"a.b*": "x*"}, "aXbc", "aXbc"),  # not a regular expression
        ({"*.b": "*.c"}, "aXb", "aXb"),
        ({"a.*": "a.*"}, r"a.\1", r"a.\1"),
    ],
)
def test_a_pattern_matches_whole_names(lines: dict[str, str], name: str, new: str) -> None:
    assert NameMap(lines).rename([name]).source == {new: name}


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("map.toml", '"a.*" = "b"', "wildcards"),
        ("map.toml", '"a.*" = "b.**"', "wildcards"),
        ("map.toml", "a = 3", "a should map to a name"),
        ("map.toml", "a = ", "Invalid value"),
        ("map.json", '{"a": "b", "a": "c"}', "occurs more than once"),
        ("map.json", '["a"]', "should be an object"),
        ("map.json", b"\xff\xfe", "utf-8"),
        ("map.txt", "a = b", "Invalid value"),
    ],
)
def test_an_invalid_map_is_refused_with_the_fault(tmp_path: Path, name: str, content: str | bytes, fault: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=rf"(?s){fault}.*A name map is a table of lines"):
        read_name_map(tmp_path / name)
    with pytest.raises(UsageError, match="no such file"):
        read_name_map(tmp_path / "nowhere.toml")
