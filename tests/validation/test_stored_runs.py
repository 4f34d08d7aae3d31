"""Stored scores are read if there are as many as the run has images and classes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prelunet.evaluator.errors import RunFolderError
from prelunet.evaluator.validation.run import read_run
from prelunet.evaluator.validation.stored_runs import BLOCK, check_scores, read_rows
from tests.reporting.scored_runs import random_scores, write_scored_run

IMAGES = BLOCK + 40  # a full block and part of one
LABELS = [None if index % 13 == 5 else index % 7 for index in range(IMAGES)]
REFUSED = {3: "truncated", BLOCK + 2: "no image"}
HEADER = 128  # bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_scored_run(tmp_path / "run", random_scores(0, IMAGES), LABELS, refusals=REFUSED)


def test_scores_of_a_finished_run_are_those_that_were_stored(folder: Path) -> None:
    expected = random_scores(0, IMAGES)
    expected[list(REFUSED)] = np.nan
    run = read_run(folder)
    check_scores(run)
    scores = read_rows(run, 0, IMAGES)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, expected)
    np.testing.assert_array_equal(read_rows(run, 1000, IMAGES), expected[1000:])


@pytest.mark.parametrize("classes", [1, 2, 4, 7])
def test_runs_of_any_number_of_classes_are_read(tmp_path: Path, classes: int) -> None:
    names = [{"wnid": f"n{index}", "name": "x"} for index in range(classes)]
    scores = random_scores(1, 30, 7)[:, :classes]
    scores /= scores.sum(axis=1, keepdims=True)
    run = read_run(write_scored_run(tmp_path / "run", scores, [index % classes for index in range(30)], classes=names))
    check_scores(run)
    np.testing.assert_array_equal(read_rows(run, 0, 30), scores)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (lambda data: data[:-1], "bytes, but the scores take"),
        (lambda data: data + b"\0" * 28, "bytes, but the scores take"),
        (lambda data: b"", "the header should be that of float32 scores of 1064 images x 7 classes"),
        (lambda data: b"\0" * HEADER + data[HEADER:], "the header should be"),
        (lambda data: data.replace(b"<f4", b"<i4", 1), "the header should be"),
        (lambda data: data.replace(b"7)", b"8)", 1), "the header should be"),
    ],
)
def test_a_scores_file_of_another_shape_type_or_length_is_refused(
    folder: Path, content: Callable[[bytes], bytes], fault: str
) -> None:
    path = folder / "scores.f32.npy"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(RunFolderError, match=rf"scores\.f32\.npy: .*{fault}.*--fresh"):
        check_scores(read_run(folder))


def test_a_run_that_lost_its_scores_is_refused(folder: Path) -> None:
    (folder / "scores.f32.npy").unlink()
    with pytest.raises(RunFolderError, match=r"scores\.f32\.npy: cannot be read .*Restore the file"):
        check_scores(read_run(folder))
