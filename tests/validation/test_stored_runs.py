"""Stored scores are accepted if they agree with their lines. Detectable damage is reported."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prelunet.evaluator.errors import RunFolderError
from prelunet.evaluator.validation.run import read_run
from prelunet.evaluator.validation.stored_runs import BLOCK, SUM_TOLERANCE, check_scores, read_rows
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


@pytest.mark.parametrize("total", [0.95, 0.998, 1.002])
def test_a_row_that_does_not_add_up_to_1_is_refused_even_where_its_line_agrees(tmp_path: Path, total: float) -> None:
    scores = random_scores(3, 10)
    scores[4, 6] += total - 1
    scores[6] *= 1.0009  # within the error of half precision, so not damage
    assert (scores >= 0).all()
    folder = write_scored_run(tmp_path / "run", scores, [2] * 10)
    with pytest.raises(
        RunFolderError, match=r"row 4 \(val/00004\.png\) has scores that are not probabilities with sum 1"
    ):
        check_scores(read_run(folder))


def change(row: int, column: int, value: float) -> Callable[[np.ndarray], None]:
    def spoil(scores: np.ndarray) -> None:
        scores[row, column] = value

    return spoil


def swap(scores: np.ndarray) -> None:
    scores[[8, 9]] = scores[[9, 8]]


def move(scores: np.ndarray) -> None:
    row = scores[8]  # swaps the second and third, so the sum does not change
    order = np.argsort(-row)
    row[order[1]] -= 2e-6
    row[order[2]] += 2e-6


def exchange_last(scores: np.ndarray) -> None:
    order = np.argsort(-scores[8])
    scores[8, order[[4, 5]]] = scores[8, order[[5, 4]]]


def negate(scores: np.ndarray) -> None:
    order = np.argsort(-scores[8])
    scores[8, order[5]] += scores[8, order[6]]  # so that it is not seen in the sum
    scores[8, order[6]] = -1e-7


def overtake(scores: np.ndarray) -> None:
    order = np.argsort(-scores[18])
    fifth, sixth = scores[18, order[4]], scores[18, order[5]]
    assert 1.01 * fifth - sixth < SUM_TOLERANCE  # so that it is not seen in the sum
    scores[18, order[5]] = 1.01 * fifth


DAMAGES: list[tuple[Callable[[np.ndarray], None], str]] = [
    (change(8, 2, np.nan), r"row 8 \(val/00008\.png\) has a score that is not a finite number"),
    (
        change(BLOCK + 5, 6, np.inf),
        rf"row {BLOCK + 5} \(val/0{BLOCK + 5}\.png\) has a score that is not a finite number",
    ),
    (change(BLOCK + 2, 0, 0.5), rf"row {BLOCK + 2} .* has scores, but its line says that it was refused"),
    (change(8, 3, 0.9), "row 8 .* not probabilities"),
    (change(8, 3, -0.1), "row 8 .* not probabilities"),
    (negate, "row 8 .* not probabilities"),
    (overtake, "row 18 .* has different best classes or scores than its line"),
    (swap, "row 8 .* has different best classes or scores than its line"),
    (move, "row 8 .* has different best classes or scores than its line"),
    (exchange_last, "row 8 .* has different best classes or scores than its line"),
]


@pytest.mark.parametrize(("spoil", "fault"), DAMAGES)
def test_a_damaged_score_is_named_with_its_row_and_image(
    folder: Path, spoil: Callable[[np.ndarray], None], fault: str
) -> None:
    scores = np.load(folder / "scores.f32.npy")
    spoil(scores)
    np.save(folder / "scores.f32.npy", scores)
    with pytest.raises(RunFolderError, match=rf"scores\.f32\.npy: {fault}.*--fresh"):
        check_scores(read_run(folder))


@pytest.mark.parametrize(
    ("there", "instead", "fault"),
    [
        ('"rank": 6', '"rank": 7', "gives the true class a different rank"),
        (', "refused": "truncated"}', ', "refused": ""}', None),
    ],
)
def test_a_line_with_another_rank_than_the_scores_is_detected(
    folder: Path, there: str, instead: str, fault: str | None
) -> None:
    lines = folder / "predictions.jsonl"
    text = lines.read_text()
    assert there in text
    lines.write_text(text.replace(there, instead, 1))
    if fault is None:
        check_scores(read_run(folder))
        return
    with pytest.raises(RunFolderError, match=fault):
        check_scores(read_run(folder))


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
