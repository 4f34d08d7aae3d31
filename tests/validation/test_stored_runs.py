"""Stored scores are accepted if they agree with their lines. Detectable damage is reported."""

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


def test_half_precision_and_the_smallest_scores_are_accepted(tmp_path: Path) -> None:
    scores = np.zeros((3, 7), np.float32)
    scores[:, 2] = 1.0004883  # half precision can exceed 1 by this much
    scores[:, 5] = 1e-45  # the smallest positive float32
    check_scores(read_run(write_scored_run(tmp_path / "run", scores, [2, 5, 0])))


def test_a_score_whose_decimal_rounds_to_its_neighbor_by_way_of_float64_is_accepted(tmp_path: Path) -> None:
    score = np.nextafter(np.float32(7.038531e-26), np.float32(0))
    assert str(score) == "7.038531e-26"
    assert np.float32(float(str(score))) != score
    scores = np.zeros((1, 7), np.float32)
    scores[0, [4, 2]] = 1, score
    check_scores(read_run(write_scored_run(tmp_path / "run", scores, [2])))


def change(row: int, column: int | slice, value: float) -> Callable[[np.ndarray], None]:
    def spoil(scores: np.ndarray) -> None:
        scores[row, column] = value

    return spoil


def swap(scores: np.ndarray) -> None:
    scores[[8, 9]] = scores[[9, 8]]


def move(scores: np.ndarray) -> None:
    row = scores[8]  # swaps the second and third
    order = np.argsort(-row)
    row[order[1]] -= 2e-6
    row[order[2]] += 2e-6


def exchange_last(scores: np.ndarray) -> None:
    order = np.argsort(-scores[8])
    scores[8, order[[4, 5]]] = scores[8, order[[5, 4]]]


def overtake(scores: np.ndarray) -> None:
    order = np.argsort(-scores[18])
    fifth, sixth = scores[18, order[4]], scores[18, order[5]]
    assert sixth < fifth
    scores[18, order[5]] = 1.01 * fifth


def add_to_the_sum(scores: np.ndarray) -> None:
    fifth, sixth, last = np.argsort(-scores[24])[4:]
    scores[24, [sixth, last]] = np.nextafter(scores[24, fifth], np.float32(0))  # the best five stay
    assert 1.02 < scores[24].sum() < 1.1


WORST_OF_8 = int(np.argmin(random_scores(0, IMAGES)[8]))  # is not in its line
DAMAGES: list[tuple[int, Callable[[np.ndarray], None]]] = [
    (8, change(8, 3, 0.9)),
    (8, change(8, WORST_OF_8, np.nan)),
    (8, change(8, WORST_OF_8, -1e30)),
    (8, change(8, WORST_OF_8, -1e-6)),
    (8, change(8, WORST_OF_8, -np.inf)),
    (8, change(8, WORST_OF_8, np.inf)),
    (24, add_to_the_sum),
    (3, change(3, slice(None), 1 / 7)),  # of a refused image
    (3, change(3, 2, 0.0)),
    (BLOCK + 5, change(BLOCK + 5, slice(None), np.nan)),
    (18, overtake),
    (8, swap),
    (8, move),
    (8, exchange_last),
]


@pytest.mark.parametrize(("row", "spoil"), DAMAGES)
def test_scores_that_contradict_a_line_are_named_with_their_row_and_image(
    folder: Path, row: int, spoil: Callable[[np.ndarray], None]
) -> None:
    scores = np.load(folder / "scores.f32.npy")
    spoil(scores)
    np.save(folder / "scores.f32.npy", scores)
    fault = rf"scores\.f32\.npy: row {row} \(val/{row:05}\.png\) has different best classes.*--fresh"
    with pytest.raises(RunFolderError, match=fault):
        check_scores(read_run(folder))


def test_a_block_of_refused_images_is_accepted(tmp_path: Path) -> None:
    check_scores(read_run(write_scored_run(tmp_path / "run", random_scores(0, 2), [0, 1], refusals={0: "x", 1: "y"})))


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
