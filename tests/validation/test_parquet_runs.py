"""A run on parquet files is the run on the same images in class folders, also in shards and after kill -9."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prelunet.evaluator.datasets import Dataset, DatasetSpec, open_dataset, open_from_spec
from prelunet.evaluator.reporting.gallery import build_gallery
from prelunet.evaluator.reporting.report import build_report, classes_csv
from prelunet.evaluator.validation.merge import merge
from prelunet.evaluator.validation.run import build_run_info, describe_dataset, read_run
from prelunet.evaluator.validation.validate import validate
from tests.helpers.child_processes import ForkServer, fork_server
from tests.helpers.fakes import FakeSession, fake_contract, validated
from tests.helpers.parquet_files import write_shards
from tests.validation.shared_data import CENTER, CLASSES, contents, write_dataset


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_dataset(tmp_path_factory.mktemp("folders") / "val")


@pytest.fixture(scope="module")
def data(folders: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same images in the same order in two parquet files."""
    images, labels = map(folders.read, folders.samples), [sample.label for sample in folders.samples]
    return write_shards(tmp_path_factory.mktemp("hf") / "data", list(images), labels, CLASSES).parent


def opened(data: Path) -> Dataset:
    return open_from_spec(DatasetSpec(data), fake_contract().classes)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    validated(FakeSession(), opened(data), CENTER, folder)
    return folder


def lines_without_names(folder: Path) -> list[dict[str, Any]]:
    return [{**json.loads(line), "file": ""} for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_predictions_scores_and_report_are_those_of_class_folders(
    folders: Dataset, whole: Path, tmp_path: Path
) -> None:
    validated(FakeSession(), folders, CENTER, tmp_path)
    assert contents(whole)["scores.f32.npy"] == contents(tmp_path)["scores.f32.npy"]
    assert lines_without_names(whole) == lines_without_names(tmp_path)
    reports = [build_report(read_run(folder)) for folder in (whole, tmp_path)]
    assert classes_csv(reports[0]) == classes_csv(reports[1])


def test_the_reports_pictures_come_from_the_parquet_files(data: Path, whole: Path) -> None:
    gallery = build_gallery(read_run(whole), data)
    assert gallery.mistakes
    assert all(mistake.thumbnail is not None for mistake in gallery.mistakes)


@pytest.mark.parametrize("threads", [1, 4])
def test_more_decoding_threads_give_the_same_bytes(data: Path, whole: Path, threads: int, tmp_path: Path) -> None:
    session = FakeSession()
    session.placement = replace(session.placement, threads=threads)
    validated(session, opened(data), CENTER, tmp_path)
    assert contents(tmp_path) == contents(whole)


def test_merged_shards_are_the_whole_run(data: Path, tmp_path: Path) -> None:
    runs = {shard: tmp_path / f"{shard}" for shard in (None, (1, 2), (2, 2))}
    for shard, folder in runs.items():
        dataset, session = opened(data), FakeSession()
        info = build_run_info(session, "m.onnx", describe_dataset(dataset), CENTER, shard)
        validate([session], dataset, replace(info, chunk=8), folder)
    merge([runs[1, 2], runs[2, 2]], tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(runs[None])


def test_a_part_of_the_images_keeps_their_names_and_bytes(data: Path, folders: Dataset) -> None:
    part = open_from_spec(DatasetSpec(data, limit=7), fake_contract().classes)
    everything = opened(data)
    assert set(part.samples) < set(everything.samples)
    numbers = [everything.samples.index(sample) for sample in part.samples]
    assert [part.read(sample) for sample in part.samples] == [folders.read(folders.samples[n]) for n in numbers]


@pytest.fixture(scope="module")
def children() -> Iterator[ForkServer]:
    with fork_server() as started:
        yield started


@pytest.mark.parametrize("step", [5, 9])
def test_a_killed_run_resumes_and_ends_in_the_same_bytes(
    children: ForkServer, data: Path, step: int, tmp_path: Path
) -> None:
    order = {"data": data, "copies": 3}
    assert children.kill_at_step(0, folder=tmp_path / "whole", **order) == 0
    assert children.kill_at_step(step, folder=tmp_path / "run", **order) == -signal.SIGKILL
    assert children.kill_at_step(0, folder=tmp_path / "run", **order) == 0
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_the_dataset_of_a_class_folder_run_is_another_one(data: Path, folders: Dataset) -> None:
    assert opened(data).fingerprint != folders.fingerprint
    assert open_dataset(data, split="val", wnids=CLASSES).fingerprint == opened(data).fingerprint
