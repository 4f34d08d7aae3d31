"""Parts of a dataset: evenly spread images, some classes. Different parts never have the same description."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelunet.evaluator.contract import MAX_NAME_LENGTH, ClassEntry
from prelunet.evaluator.datasets import Dataset, DatasetSpec, Sample, parse_class_selection, select
from prelunet.evaluator.errors import DatasetError, UsageError
from tests.helpers.tiny_datasets import CLASSES, WNIDS


class _UnreadableReader:
    def read(self, file: str) -> bytes:
        raise AssertionError(file)


def dataset(images: int = 100, labels: int = 10) -> Dataset:
    samples = [Sample(f"{number:03}.png", number % labels, number) for number in range(images)]
    return Dataset(
        Path("data"), WNIDS, samples, _UnreadableReader(), remarks=("found",), spec=DatasetSpec(Path("data"))
    )


def numbers(part: Dataset) -> list[int]:
    return [sample.size for sample in part.samples]


@given(st.integers(1, 300), st.integers(1, 300))
def test_limit_takes_the_images_at_floor_of_i_times_total_by_limit(images: int, limit: int) -> None:
    part = select(dataset(images), limit=limit, classes=())
    expected = [i * images // limit for i in range(limit)] if limit < images else list(range(images))
    assert numbers(part) == expected
    assert len(set(numbers(part))) == len(part.samples) == min(limit, images)
    assert part.selection == (f"{limit} images spread evenly" if limit < images else None)


def test_classes_keep_their_labels_and_the_limit_counts_among_them() -> None:
    part = select(dataset(), limit=3, classes=(WNIDS[7], WNIDS[2]))
    of_classes = [number for number in range(100) if number % 10 in {2, 7}]
    assert numbers(part) == [of_classes[0], of_classes[20 // 3], of_classes[40 // 3]]
    assert {sample.label for sample in part.samples} <= {2, 7}
    assert part.selection == f"classes {WNIDS[2]}, {WNIDS[7]}, of these 3 images spread evenly"
    assert part.classes == WNIDS
    assert part.spec == DatasetSpec(Path("data"), limit=3, classes=(WNIDS[7], WNIDS[2]))


def test_a_whole_dataset_is_no_selection_and_a_limit_beyond_it_gives_a_remark() -> None:
    whole = dataset()
    assert select(whole, limit=None, classes=()) == whole
    part = select(whole, limit=101, classes=())
    assert (part.selection, numbers(part)) == (None, list(range(100)))
    assert part.remarks == ("found", "--limit 101: there are only 100 images; all of them are used")


def test_classes_without_images_give_a_remark_and_an_error_when_no_image_is_left() -> None:
    part = select(dataset(), limit=None, classes=(WNIDS[0], WNIDS[11]))
    assert part.remarks[-1] == f"no images of 1 of the 2 selected classes: {WNIDS[11]}"
    with pytest.raises(DatasetError, match=rf"no images of the selected classes \({WNIDS[10]}, {WNIDS[11]}\)"):
        select(dataset(), limit=None, classes=WNIDS[10:])
    with pytest.raises(DatasetError, match="no images of the selected classes"):
        select(dataset(), limit=None, classes=(WNIDS[0], "n99999999"))


def test_different_selections_have_different_descriptions() -> None:
    names = ("a", "b", "a, b", "c", "a b", *(f"d{i}" for i in range(8)))
    whole = Dataset(Path("data"), names, [Sample(f"{i:03}", i % 13, i) for i in range(100)], _UnreadableReader())
    words: dict[str | None, list[int]] = {}
    for count in (0, 1, 2, 9, 12):
        for chosen in itertools.combinations(names, count):
            for limit in (None, 2, 3):
                part = select(whole, limit=limit, classes=chosen)
                assert words.setdefault(part.selection, numbers(part)) == numbers(part)
    assert len(words) > 700


def test_a_selection_of_few_classes_names_them() -> None:
    names = ("ankle-boot", "bag", "flat cap")
    whole = Dataset(Path("data"), names, [Sample(f"{i}.png", i % 3, i) for i in range(6)], _UnreadableReader())
    assert select(whole, limit=None, classes=("flat cap", "ankle-boot")).selection == "classes ankle-boot, flat cap"


def test_a_selection_of_long_names_fits_into_run_json() -> None:
    names = ("a" * 600, "b" * 600)
    samples = [Sample(f"{i}.png", i % 2, i) for i in range(4)]
    part = select(Dataset(Path("data"), names, samples, _UnreadableReader()), limit=3, classes=names)
    assert part.selection is not None
    assert len(part.selection) <= MAX_NAME_LENGTH


def test_the_order_of_the_classes_does_not_change_the_selection() -> None:
    for count in (2, 12):
        words = {
            select(dataset(labels=12), limit=None, classes=chosen).selection
            for chosen in (WNIDS[:count], WNIDS[:count][::-1])
        }
        assert len(words) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{WNIDS[7]},{WNIDS[2]}", (2, 7)),
        (f" {WNIDS[2]} , {WNIDS[2]},", (2,)),
        ("10,2", (2, 10)),
        ("fox terrier,tench", (0, 5)),
        (f"Maillot,{WNIDS[1]}", (1, 7)),
    ],
)
def test_classes_are_selected_by_wnid_index_or_name(text: str, expected: tuple[int, ...], tmp_path: Path) -> None:
    assert parse_class_selection(text, CLASSES) == tuple(WNIDS[index] for index in expected)
    (tmp_path / "classes.txt").write_text("".join(f"{word.strip()}\n" for word in text.split(",")))
    assert parse_class_selection(str(tmp_path / "classes.txt"), CLASSES) == tuple(WNIDS[index] for index in expected)


def test_names_of_classes_may_have_commas() -> None:
    classes = [ClassEntry(name, name) for name in ("drake", "tench, Tinca tinca", "a/b, c.d")]
    assert parse_class_selection("tench, Tinca tinca", classes) == ("tench, Tinca tinca",)
    assert parse_class_selection("a/b, c.d\ndrake", classes) == ("drake", "a/b, c.d")


def test_lines_of_a_file_of_classes_may_have_more_words(tmp_path: Path) -> None:
    (tmp_path / "synsets.txt").write_text(f"{WNIDS[3]} crane, a bird\n\n{WNIDS[0]}\tfish\n")
    assert parse_class_selection(str(tmp_path / "synsets.txt"), CLASSES) == (WNIDS[0], WNIDS[3])
    (tmp_path / "synsets.txt").write_text(f"{WNIDS[3]}\nmaillot, tank suit\n")
    assert parse_class_selection(str(tmp_path / "synsets.txt"), CLASSES) == (WNIDS[3], WNIDS[7])


def test_unknown_classes_are_refused_with_their_place(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="--classes: the label 'n99' is not one of the model's 12 classes"):
        parse_class_selection(f"{WNIDS[0]},n99", CLASSES)
    with pytest.raises(DatasetError, match=f"'crane' could be {WNIDS[1]} .crane. and {WNIDS[3]}"):
        parse_class_selection("crane", CLASSES)
    with pytest.raises(DatasetError, match="--classes: the label 12 is not one of the model's 12 classes, 0 to 11"):
        parse_class_selection("0,12", CLASSES)
    (tmp_path / "c.txt").write_text(f"{WNIDS[0]}\ndragon\n")
    with pytest.raises(DatasetError, match=r"c\.txt: line 2: the label 'dragon'"):
        parse_class_selection(str(tmp_path / "c.txt"), CLASSES)
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        parse_class_selection(str(tmp_path / "c.txt"), CLASSES)
    for nothing in ("", ","):
        with pytest.raises(UsageError, match="names no class"):
            parse_class_selection(nothing, CLASSES)


def test_a_single_class_may_be_selected_by_its_index() -> None:
    assert parse_class_selection("3", [ClassEntry(f"n{i:08}", f"class {i}") for i in range(6)]) == ("n00000003",)


@pytest.mark.parametrize("text", ["lists/missing.txt", "missing.txt"])
def test_a_file_of_classes_that_does_not_exist_is_called_so(text: str) -> None:
    with pytest.raises(UsageError, match=rf"--classes {text}: no such file, and not a class"):
        parse_class_selection(text, CLASSES)
