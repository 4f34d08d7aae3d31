"""Class lists of new and imported nets, in the usual formats."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prelunet.evaluator.datasets.labels.class_file import MAX_CLASSES, read_class_list
from prelunet.evaluator.errors import EnvironmentFault, UsageError

PAIRS = [("n01440764", "tench, Tinca tinca"), ("n01443537", "goldfish"), ("n02012849", "crane")]


@pytest.mark.parametrize(
    "content",
    [
        "".join(f"{wnid} {name}\n" for wnid, name in PAIRS),
        "\ufeff" + "".join(f"{wnid}\t{name}\r\n" for wnid, name in PAIRS) + "\n\n",
        json.dumps({str(index): pair for index, pair in reversed(list(enumerate(PAIRS)))}),
        json.dumps([{"wnid": wnid, "name": name} for wnid, name in PAIRS]),
        "\n" + json.dumps(PAIRS),
    ],
    ids=["spaces", "tabs", "imagenet_class_index.json", "list of objects", "list of pairs"],
)
def test_wnids_and_names_are_read_from_every_form(content: str, tmp_path: Path) -> None:
    path = tmp_path / "classes"
    path.write_bytes(content.encode())
    assert [(entry.wnid, entry.name) for entry in read_class_list(path)] == PAIRS


@pytest.mark.parametrize("form", ["\n".join, json.dumps, lambda names: json.dumps(dict(enumerate(names)))])
def test_names_alone_are_their_own_wnids_and_those_that_several_have_get_their_index(form: Any, tmp_path: Path) -> None:
    path = tmp_path / "classes"
    path.write_text(form(["great white shark", "crane", "n0 way", "crane"]))
    assert [(entry.wnid, entry.name) for entry in read_class_list(path)] == [
        ("great white shark", "great white shark"),
        ("crane (1)", "crane"),
        ("n0 way", "n0 way"),
        ("crane (3)", "crane"),
    ]


COLORS = ["red", "no", "sky blue", "green, dark"]
NUMBERED = {name: index for index, name in enumerate(COLORS)}
BY_NUMBER = {str(index): name for index, name in enumerate(COLORS)}


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(dict(sorted(NUMBERED.items()))),
        json.dumps({"architectures": ["ViT"], "id2label": BY_NUMBER, "label2id": NUMBERED, "hidden_size": 768}),
        json.dumps({"architecture": "resnet18", "num_classes": 4, "label_names": COLORS}),
        repr(dict(enumerate(COLORS))),
        repr(NUMBERED),
        "path: ../data\nnames: [red, no, sky blue, 'green, dark']\nnc: 4\n",
        "train: images\nnames:\n  0: red\n  1: no\n  2: sky blue\n  3: green, dark\n",
        "names:\n- red\n- no\n- sky blue\n- green, dark\n",
        "0,red\n1,no\n2,sky blue\n3,green, dark\n",
        "2: sky blue\n0: red\n3: green, dark\n1: no\n",
        "0 red\n1 no\n2 sky blue\n3 green, dark\n",
        "green, dark;3\nred;0\nno;1\nsky blue;2\n",
        "red\t0\nno\t1\nsky blue\t2\ngreen, dark\t3\n",
    ],
    ids=[
        "class_to_idx", "config.json of Hugging Face", "config.json of timm", "Python dict", "Python dict of names",
        "YAML list", "YAML map", "YAML lines", "index, name", "index: name", "index name", "name;index", "name, index",
    ],
)  # fmt: skip
def test_the_classes_are_found_in_the_files_of_other_tools_in_the_order_of_their_indices(
    content: str, tmp_path: Path
) -> None:
    path = tmp_path / "classes"
    path.write_text(content)
    assert [entry.name for entry in read_class_list(path)] == COLORS
    path.write_bytes(content.encode("utf-16"))
    assert [entry.name for entry in read_class_list(path)] == COLORS, "as Notepad saves it"


@pytest.mark.parametrize("names", [["1 cent", "2 cent", "5 cent", "1 euro"], ["3", "8"], ["boeing 707", "airbus 320"]])
def test_a_number_in_a_name_is_part_of_it(names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "classes"
    path.write_text("\n".join(names))
    assert [entry.name for entry in read_class_list(path)] == names


def test_more_than_ten_classes_of_an_object_are_ordered_by_number_and_not_by_text(tmp_path: Path) -> None:
    path = tmp_path / "classes.json"
    path.write_text(json.dumps({str(index): f"name {index}" for index in range(12)}, sort_keys=True))
    assert [entry.name for entry in read_class_list(path)] == [f"name {index}" for index in range(12)]


def test_two_classes_may_have_one_name_when_their_wnids_differ_and_a_wnid_alone_is_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("n00000002 crane\nn00000001 crane\nn00000003\n")
    entries = [(entry.wnid, entry.name) for entry in read_class_list(path)]
    assert entries == [("n00000002", "crane"), ("n00000001", "crane"), ("n00000003", "n00000003")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1 is empty"),
        (b"a\n\nb\n", "line 2 is empty"),
        (b"n00000001 a\nn00000001 b\n", "class 1 repeats the wnid n00000001 of class 0"),
        (b"n00000001 a\nn00000002 b\nhen\n", "line 1 begins with a wnid, but line 3 does not"),
        (b"hen\nn00000002 b\n", "line 2 begins with a wnid, but line 1 does not"),
        (b"a\tb\nc d\n", "line 1 has a tab, but line 2 does not"),
        (b'{"0": "a", "2": "b"}', "class index 1 of 2 classes is missing"),
        (b'{"0": ["n00000001", "a", "b"]}', "Expected `array` of length 2, got 3 - at `$[0]`"),
        (b'[{"wnid": "a"}]', "missing required field `name` - at `$[0]`"),
        (b"red\t50\ngreen\t70\n", "'red' has the number 50, but 2 class indices go from 0 to 1, each once"),
        (b"1,red\n2,green\n", "'green' has the number 2, but 2 class indices go from 0 to 1, each once"),
        (b'{"red": 1, "green": 1}', "'green' has the number 1, but 2 class indices go from 0 to 1, each once"),
        (b"names: [red\n", "not YAML: while parsing a flow sequence"),
        (b"{'red': open}", "Expecting property name enclosed in double quotes"),
        (b"[1, 2]", "got `int` - at `$[0]`"),
        (b'["a", "  "]', "class 1 has neither a wnid nor a name"),
        (b"[]", "lists no classes"),
        (b"[" * 100_000, "nested too deeply"),
        (b'["a"', "delimiter"),
        (b"caf\xe9\n", "not UTF-8 text"),
    ],
)
def test_a_malformed_class_list_is_refused_with_the_place(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "classes"
    path.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_class_list(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_the_built_in_list_has_the_thousand_classes_of_imagenet_in_the_order_of_their_wnids() -> None:
    entries = read_class_list(Path("imagenet-1k"))
    wnids = [entry.wnid for entry in entries]
    assert len(set(wnids)) == 1000
    assert wnids == sorted(wnids)
    assert all(re.fullmatch(r"n\d{8}", wnid) for wnid in wnids)
    names = {entry.wnid: entry.name for entry in entries}
    # Index 0, 134 and 517 (both of one name), 278 and 999, as in Keras's imagenet_class_index.json.
    known = {0: "n01440764", 134: "n02012849", 278: "n02119789", 517: "n03126707", 999: "n15075141"}
    assert {index: wnids[index] for index in known} == known
    assert names["n02119789"] == "kit fox, Vulpes macrotis"
    assert names["n02012849"] == names["n03126707"] == "crane"


def test_a_class_list_that_is_missing_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises((UsageError, EnvironmentFault), match=str(path)):
            read_class_list(path)
    with pytest.raises(UsageError, match=r"imagenet: no such file.*, or imagenet-1k for ImageNet's 1000 classes"):
        read_class_list(Path("imagenet"))


def test_more_classes_than_a_machine_can_hold_are_refused_and_as_many_as_it_can_are_not(tmp_path: Path) -> None:
    path = tmp_path / "classes"
    path.write_text("".join(f"{index}\n" for index in range(MAX_CLASSES)))
    assert len(read_class_list(path)) == MAX_CLASSES
    path.write_text("".join(f"{index}\n" for index in range(MAX_CLASSES + 1)))
    with pytest.raises(UsageError, match="100001 classes, but a net has 1 to 100000"):
        read_class_list(path)
