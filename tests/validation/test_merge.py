"""Merged shards equal the run of one machine, byte for byte. Missing and duplicate shards are refused."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.cli import run as prelunet
from prelunet.evaluator.datasets import DatasetSpec, open_dataset
from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.errors import RunFolderError, UsageError
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.merge import merge
from prelunet.evaluator.validation.run import build_run_info, describe_dataset, read_run
from prelunet.evaluator.validation.run_log import find_dataset
from prelunet.evaluator.validation.validate import validate
from prelunet.evaluator.validation.writer import RunWriter
from tests.helpers.fakes import FakeSession, fake_contract
from tests.reporting.scored_runs import changed_info
from tests.validation.shared_data import RESULT, contents

CLASSES = [entry.wnid for entry in fake_contract().classes]
PROTOCOL = build_protocol("center", fake_contract())
IMAGES, CHUNK = 61, 8  # seven full chunks and one of five
BAD = 29


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Write 61 images of five sizes, of four of the six classes; one is damaged."""
    folder = tmp_path_factory.mktemp("data") / "val"
    rng = np.random.default_rng(3)
    for index in range(IMAGES):
        path = folder / CLASSES[(0, 1, 3, 5)[index * 4 // IMAGES]] / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if index == BAD:
            path.write_bytes(b"no image")
        else:
            Image.fromarray(rng.integers(0, 256, (30 + index % 5, 41, 3), np.uint8)).save(path)
    return open_dataset(folder, split="val", wnids=CLASSES)


def make(dataset: Dataset, folder: Path, shard: tuple[int, int] | None, *, seed: int = 0, chunk: int = CHUNK) -> Path:
    session = FakeSession(seed=seed)
    info = build_run_info(session, "m.onnx", describe_dataset(dataset), PROTOCOL, shard)
    validate([session], dataset, replace(info, chunk=chunk), folder)
    return folder


@pytest.fixture(scope="module")
def whole(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(make(dataset, tmp_path_factory.mktemp("runs") / "whole", None))


@pytest.fixture(scope="module")
def three(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Create three shards, shared by many tests, which must not change them."""
    folder = tmp_path_factory.mktemp("three")
    return [make(dataset, folder / str(number), (number, 3)) for number in (1, 2, 3)]


@pytest.fixture
def shards(three: list[Path], tmp_path: Path) -> list[Path]:
    """Return copies of the three shards, for tests that damage them."""
    return [Path(shutil.copytree(path, tmp_path / f"shard-{path.name}")) for path in three]


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_merged_shards_are_byte_for_byte_the_run_of_one_machine(
    dataset: Dataset, whole: dict[str, bytes], tmp_path: Path, of: int
) -> None:
    folders = [make(dataset, tmp_path / str(number), (number, of)) for number in range(1, of + 1)]
    merged = merge([*folders[1:], folders[0]], tmp_path / "merged")
    assert contents(tmp_path / "merged") == whole
    assert len(merged.predictions) == IMAGES
    assert merged.info.shard is None


def test_shards_of_more_images_than_are_copied_at_a_time_are_merged(
    dataset: Dataset, whole: dict[str, bytes], three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prelunet.evaluator.validation.merge.BLOCK", 20)  # two chunks and part of a third
    merge(three, tmp_path / "merged")
    assert contents(tmp_path / "merged") == whole


def test_empty_shards_are_not_missing(dataset: Dataset, tmp_path: Path) -> None:
    # 61 images are 2 chunks of 40: of 5 shards only 3 and 5 have images, and validate refuses to create the others.
    folders = [make(dataset, tmp_path / str(number), (number, 5), chunk=40) for number in (5, 3)]
    merge(folders, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(make(dataset, tmp_path / "whole", None, chunk=40))
    with pytest.raises(RunFolderError, match=r"missing: 3/5, 40 of 61 images"):
        merge(folders[:1], tmp_path / "other")


def test_the_merged_run_records_where_its_images_are(dataset: Dataset, three: list[Path], tmp_path: Path) -> None:
    merge(three, tmp_path / "merged")
    assert find_dataset(tmp_path / "merged") == DatasetSpec(dataset.location.resolve())


@pytest.mark.parametrize("appended", [0, 1, 2, 3, 5])
def test_a_merge_that_was_killed_is_no_run_until_the_same_command_has_finished_it(
    whole: dict[str, bytes], three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appended: int
) -> None:
    append, calls = RunWriter.append, 0

    def stopping(self: RunWriter, *args: Any) -> None:
        nonlocal calls
        if calls == appended:
            with (tmp_path / "merged" / "scores.f32.npy").open("ab") as file:
                file.write(b"\xff" * 100)  # the scores of the next chunk, written before its lines
            raise KeyboardInterrupt
        calls += 1
        append(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr("prelunet.evaluator.validation.merge.BLOCK", CHUNK)
        patch.setattr(RunWriter, "append", stopping)
        with pytest.raises(KeyboardInterrupt):
            merge(three, tmp_path / "merged")
    with pytest.raises(RunFolderError, match=rf"{appended * CHUNK} of {IMAGES} images are done"):
        read_run(tmp_path / "merged")
    said: list[str] = []
    merge(three, tmp_path / "merged", report=said.append)
    assert contents(tmp_path / "merged") == whole
    assert (f"resuming after {appended * CHUNK} of 61" if appended else ": new") in said[0]


def test_merging_again_changes_nothing_and_reports_that(three: list[Path], tmp_path: Path) -> None:
    merge(three, tmp_path / "merged")
    before = {name: (tmp_path / "merged" / name).stat().st_mtime_ns for name in (*RESULT, "log.jsonl")}
    said: list[str] = []
    merge(three, tmp_path / "merged", report=said.append)
    assert {name: (tmp_path / "merged" / name).stat().st_mtime_ns for name in before} == before
    assert "already finished" in said[0]


def test_a_missing_shard_is_named_with_the_options_that_create_it(shards: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError) as caught:
        merge([shards[2], shards[0]], tmp_path / "merged")
    told = str(caught.value)
    assert "missing: 2/3, 24 of 61 images" in told  # of 8 chunks the third to the fifth
    assert f"the command of {shards[0]}, but its own number and folder: --shard 2/3 --run DIR" in told
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(("of", "missing"), [(999_999, "..."), (8, "2/8, 3/8, 4/8, 5/8, 6/8, 7/8, 8/8, 53 of 61")])
def test_the_shards_that_are_missing_are_counted_however_many_there_are(
    shards: list[Path], tmp_path: Path, of: int, missing: str
) -> None:
    # With a million shards of 8 chunks, only the last shard of each eighth has a chunk.
    changed_info(shards[0], "shard", value={"number": -(-of // 8), "of": of})
    with pytest.raises(RunFolderError, match=rf"missing: .*{re.escape(missing.replace('...', ''))}") as caught:
        merge(shards[:1], tmp_path / "merged")
    named = re.findall(r"\d+/\d+", str(caught.value).partition(" of 61")[0])
    assert named == [f"{-(-number * of // 8)}/{of}" for number in range(2, 9)]


@pytest.mark.parametrize("of", [1_000_000, 10**12, 10**30])
def test_too_many_shards_are_refused(shards: list[Path], tmp_path: Path, of: int) -> None:
    changed_info(shards[0], "shard", value={"number": 1, "of": of})
    with pytest.raises(RunFolderError, match=r"run\.json: damaged \(Expected `int` <= 999999 - at `\$\.shard\.of`"):
        merge(shards, tmp_path / "merged")


def test_a_shard_given_twice_is_named(shards: list[Path], tmp_path: Path) -> None:
    again = Path(shutil.copytree(shards[1], tmp_path / "again"))
    for doubled in (again, shards[1]):
        with pytest.raises(RunFolderError, match=rf"{doubled}: is shard 2/3, as is {shards[1]}.*count twice"):
            merge([*shards, doubled], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


OTHERS: list[tuple[tuple[str, ...], Any, str]] = [
    (("model", "sha256"), "0" * 64, r"model\.sha256: .* in .*shard-1, 000"),
    (("dataset", "fingerprint"), "e" * 64, r"dataset\.fingerprint: "),
    (("dataset", "images"), 62, r"dataset\.images: 61 in .*shard-1, 62 in .*shard-2"),
    (("dataset", "selection"), "the first 61", r"dataset\.selection: None in"),
    (("circumstances", "provider"), "CUDAExecutionProvider", r"circumstances\.provider: "),
    (("chunk",), 64, r"chunk: 8 in .*shard-1, 64 in .*shard-2"),
    (("shard", "of"), 4, r"shard\.of: 3 in .*shard-1, 4 in .*shard-2"),
    (("protocol", "averaging"), "logit", r"protocol\.averaging: softmax in .*, logit in"),
]


@pytest.mark.parametrize(("path", "value", "fault"), OTHERS)
def test_shards_of_different_runs_are_refused_with_the_difference(
    shards: list[Path], tmp_path: Path, path: tuple[str, ...], value: Any, fault: str
) -> None:
    changed_info(shards[1], *path, value=value)
    with pytest.raises(RunFolderError, match=rf"(?s)shard-2: not a shard of the same run as .*shard-1:.*{fault}"):
        merge(shards, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_shards_may_differ_in_the_names_of_the_same_model_and_data(
    shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    changed_info(shards[2], "model", "file", value="copy.onnx")
    changed_info(shards[2], "dataset", "name", value="val.tar")
    merge(shards, tmp_path / "merged")
    assert contents(tmp_path / "merged") == whole


def test_a_complete_run_is_refused_as_a_shard(dataset: Dataset, shards: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"whole: a complete run, not a shard.*--shard NUMBER/OF"):
        merge([*shards, make(dataset, tmp_path / "whole", None)], tmp_path / "merged")


def cut_lines(folder: Path) -> None:
    path = folder / "predictions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def spoil_line(folder: Path) -> None:
    path = folder / "predictions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[4][:30] + "\n", *lines[5:]]))


def cut_scores(folder: Path) -> None:
    path = folder / "scores.f32.npy"
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (cut_lines, r"shard-2: 23 of 24 images are done\. Finish the run"),
        (spoil_line, r"shard-2/predictions\.jsonl: line 5 is damaged"),
        (cut_scores, r"shard-2/scores\.f32\.npy: \d+ bytes, but"),
        (shutil.rmtree, r"shard-2: no run\.json in this folder"),
    ],
)
def test_an_unfinished_or_damaged_shard_is_refused_before_anything_is_written(
    shards: list[Path], tmp_path: Path, spoil: Callable[[Path], None], fault: str
) -> None:
    spoil(shards[1])
    with pytest.raises(RunFolderError, match=fault):
        merge(shards, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_another_run_is_not_overwritten_without_fresh(
    dataset: Dataset, whole: dict[str, bytes], shards: list[Path], tmp_path: Path
) -> None:
    other = make(dataset, tmp_path / "other", None, seed=1)
    before = contents(other)
    with pytest.raises(RunFolderError, match=r"(?s)contains another run:.*model\.sha256.*--fresh"):
        merge(shards, other)
    assert contents(other) == before
    merge(shards, other, fresh=True)
    assert contents(other) == whole


def test_a_shard_is_never_the_target(shards: list[Path]) -> None:
    before = contents(shards[0])
    with pytest.raises(UsageError, match="is the input itself"):
        merge(shards, shards[0].parent / "." / shards[0].name, fresh=True)
    assert contents(shards[0]) == before


def test_the_verb_merges_and_its_run_can_be_reported(
    three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prelunet(["merge", *map(str, three), "--run", str(tmp_path / "merged")]) == 0
    told = capsys.readouterr()
    assert "3 shards, 61 images; none missing or duplicated" in told.out
    assert re.search(r"merge: 61/61 images", told.err)
    assert prelunet(["report", str(tmp_path / "merged")]) == 0
    assert prelunet(["merge", str(three[0]), "--run", str(tmp_path / "other")]) == 2
    assert "missing: 2/3, 3/3" in capsys.readouterr().err


def test_a_shard_without_images_is_named(shards: list[Path], tmp_path: Path) -> None:
    path = shards[0] / "run.json"
    run = json.loads(path.read_text())
    chunks = -(-run["dataset"]["images"] // run["chunk"])
    path.write_text(json.dumps({**run, "shard": {"number": 1, "of": chunks + 1}}))
    with pytest.raises(RunFolderError, match=rf"{shards[0]}: shard 1/{chunks + 1} of this run has no images"):
        merge([shards[0]], tmp_path / "merged")
