"""Classes with names alone (Hugging Face's id2label) are matched with labels that are ImageNet's wnids, or refused."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets import Dataset, parse_class_selection
from prelunet.evaluator.datasets.labels.class_file import read_class_list
from prelunet.evaluator.errors import DatasetError
from tests.helpers.opened_datasets import opened, refusal
from tests.helpers.tiny_datasets import GROUND_TRUTH, write_folder, write_tar

IMAGENET = read_class_list(Path("imagenet-1k"))
# tench, the two cranes, the two maillots, toilet tissue: as in Keras's imagenet_class_index.json
WNIDS = {"n01440764": 0, "n02012849": 134, "n03126707": 517, "n03710637": 638, "n03710721": 639, "n15075141": 999}
REMARK = "matched to the model's class names by the list of ImageNet's 1000 classes"


def from_names(place: Path, names: Iterable[str]) -> tuple[ClassEntry, ...]:
    """Return the classes of a model that was adopted with an id2label."""
    (place / "id2label.json").write_text(json.dumps(dict(enumerate(names))))
    return read_class_list(place / "id2label.json")


def by_wnid(place: Path, wnids: Iterable[str]) -> Path:
    return write_folder(place / "val", {f"{wnid}/a.png": b"a" for wnid in wnids})


def labels_of(dataset: Dataset) -> dict[str, int]:
    return {sample.file.partition("/")[0]: sample.label for sample in dataset.samples}


@pytest.mark.parametrize(
    "form", [str, lambda name: name.partition(",")[0], lambda name: name.partition(",")[0].replace(" ", "_").upper()]
)
def test_the_thousand_names_in_order_are_the_thousand_wnids_in_order(
    tmp_path: Path, form: Callable[[str], str]
) -> None:
    classes = from_names(tmp_path, (form(entry.name) for entry in IMAGENET))
    dataset = opened(by_wnid(tmp_path, WNIDS), classes=classes)
    assert labels_of(dataset) == WNIDS
    assert dataset.classes == tuple(entry.wnid for entry in classes)
    assert any(
        f"val: folders matched to the model's classes by ImageNet's wnids, {REMARK}" in r for r in dataset.remarks
    )


def test_names_in_another_order_are_matched_one_by_one_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    names = [entry.name for entry in IMAGENET]
    names[0], names[999] = names[999], names[0]
    classes = from_names(tmp_path, names)
    assert labels_of(opened(by_wnid(tmp_path / "a", ["n01440764", "n02119789"]), classes=classes)) == {
        "n01440764": 999,
        "n02119789": 278,
    }
    for number, (wnid, other, first, second) in enumerate(
        [
            ("n03126707", "n02012849", "'crane (134)' (class index 134)", "'crane (517)' (class index 517)"),
            (
                "n02113186",
                "n02963159",
                "'Cardigan, Cardigan Welsh corgi' (class index 264)",
                "'cardigan' (class index 474)",
            ),
            ("n03710721", "n03710637", "'maillot' (class index 638)", "'maillot, tank suit' (class index 639)"),
        ]
    ):
        message = refusal(by_wnid(tmp_path / str(number), ["n01440764", wnid]), classes=classes)
        assert f"val/{wnid}: the model's classes have names but no wnids" in message
        assert f"{' and '.join(sorted((wnid, other)))} could be {first} and {second}" in message
        assert "adopt the model again with wnids in its --classes (imagenet-1k if" in message


@pytest.mark.parametrize(
    ("names", "wnid", "message"),
    [
        (("goldfish", "crane"), "n02012849", "n02012849 and n03126707 could be 'crane' (class index 1)"),
        (
            ("tench", "Tench, Tinca tinca", "goldfish"),
            "n01440764",
            "n01440764 could be 'tench' (class index 0) and 'Tench, Tinca tinca' (class index 1)",
        ),
    ],
)
def test_a_match_that_is_not_one_to_one_is_refused_only_where_it_is_needed(
    tmp_path: Path, names: tuple[str, ...], wnid: str, message: str
) -> None:
    classes = from_names(tmp_path, names)
    assert message in refusal(by_wnid(tmp_path, [wnid]), classes=classes)
    goldfish = labels_of(opened(by_wnid(tmp_path / "other", ["n01443537"]), classes=classes))
    assert goldfish == {"n01443537": names.index("goldfish")}


def test_wnids_whose_names_the_model_lacks_are_named(tmp_path: Path) -> None:
    classes = from_names(tmp_path, ["goldfish", "tench, Tinca tinca", "fork lift"])
    data = by_wnid(tmp_path, ["n01440764", "n01443537", "n02119789", "n09999999"])
    assert "2 of 4 class folders are not among the model's 3 classes: n02119789, n09999999" in refusal(
        data, classes=classes
    )


def test_a_model_with_wnids_of_its_own_is_never_matched_by_imagenets_names(tmp_path: Path) -> None:
    classes = [ClassEntry("n00000007", "goldfish"), ClassEntry("tench", "tench")]
    assert "class folders are not among" in refusal(by_wnid(tmp_path, ["n01440764", "n01443537"]), classes=classes)


def kaggle_list(place: Path) -> tuple[Path, Path]:
    (place / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nb,n01440764 1 2 3 4\na,n02119789 1 2 3 4\n")
    return write_folder(place / "val", {"a.png": b"a", "b.png": b"b"}), place / "LOC_val_solution.csv"


def devkit(place: Path) -> tuple[Path, Path]:
    kit = write_folder(place / "kit", {GROUND_TRUTH: b"1\n490\n", "synsets.txt": b"490 n01440764\n1 n02119789\n"})
    return write_folder(place / "val", {"a.png": b"a", "b.png": b"b"}), kit


def in_the_names(place: Path) -> tuple[Path, None]:
    return write_folder(place / "val", {"x_1_n02119789.JPEG": b"a", "x_2_n01440764.JPEG": b"b"}), None


def shard(place: Path) -> tuple[Path, None]:
    files = {"1.jpg": b"a", "1.cls": b"n02119789", "2.jpg": b"b", "2.cls": b"n01440764"}
    return write_tar(place / "val.tar", files), None


def tiny_imagenet(place: Path) -> tuple[Path, None]:
    annotations = b"b.JPEG\tn01440764\t0\t0\t9\t9\na.JPEG\tn02119789\t0\t0\t9\t9\n"
    files = {"images/a.JPEG": b"a", "images/b.JPEG": b"b", "val_annotations.txt": annotations}
    return write_folder(place / "val", files), None


@pytest.mark.parametrize("layout", [kaggle_list, devkit, in_the_names, shard, tiny_imagenet])
def test_wnids_in_every_other_place_are_matched_and_said_too(
    tmp_path: Path, layout: Callable[[Path], tuple[Path, Path | None]]
) -> None:
    classes = from_names(tmp_path, ["hen", "tench, Tinca tinca", "crane", "kit fox, Vulpes macrotis"])
    path, labels = layout(tmp_path)
    dataset = opened(path, labels, classes)
    assert [sample.label for sample in dataset.samples] == [3, 1]
    assert any(f"ImageNet's wnids, {REMARK}" in remark for remark in dataset.remarks)


def test_classes_are_selected_by_wnid_too(tmp_path: Path) -> None:
    classes = from_names(tmp_path, ["hen", "kit fox, Vulpes macrotis", "crane", "tench"])
    assert parse_class_selection("n01440764,n02119789", classes) == ("kit fox, Vulpes macrotis", "tench")
    with pytest.raises(DatasetError, match="n02012849 and n03126707 could be 'crane'"):
        parse_class_selection("n03126707", classes)


def test_a_model_with_wnids_finds_folders_named_as_in_id2label(tmp_path: Path) -> None:
    data = write_folder(
        tmp_path / "val",
        {"tench, Tinca tinca/a.png": b"a", "goldfish/b.png": b"b", "great_white_shark/c.png": b"c"},
    )
    dataset = opened(data, classes=IMAGENET)
    assert sorted(labels_of(dataset).values()) == [0, 1, 2]
    assert labels_of(dataset)["tench, Tinca tinca"] == 0
    assert any("matched to the model's classes by class names" in remark for remark in dataset.remarks)
    (data / "crane").mkdir()
    (data / "crane/a.png").touch()
    assert "'crane' could be n02012849 (crane) and n03126707 (crane), class indices 134 and 517" in refusal(
        data, classes=IMAGENET
    )


def test_numbered_folders_are_indices_of_a_model_with_names_alone(tmp_path: Path) -> None:
    classes = from_names(tmp_path, (entry.name for entry in IMAGENET[100:112]))
    numbered = write_folder(tmp_path / "v2", {f"{number}/{number}.png": b"a" for number in range(12)})
    named = write_folder(tmp_path / "v1", {f"{IMAGENET[100 + n].wnid}/{n}.png": b"a" for n in range(12)})
    found = [
        {sample.file.rpartition("/")[2]: sample.label for sample in opened(path, classes=classes).samples}
        for path in (numbered, named)
    ]
    assert found[0] == found[1] == {f"{number}.png": number for number in range(12)}  # 10 after 9, not after 1
    (numbered / "0").rename(numbered / "12")
    assert "the folders are numbers 1 to 12, and none of them is 0: are they devkit ids" in refusal(
        numbered, classes=classes
    )
