"""The columns of a run return the same objects that were read, in a tenth of their memory."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.validation import predictions
from prelunet.evaluator.validation.predictions import parse_prediction, read_predictions

IMAGES = 2500  # not a multiple of the block size


def random_lines(classes: int, views: int, images: int = IMAGES, *, plain: bool = False) -> list[dict[str, Any]]:
    """Return lines with odd names, the first and last refused, some without a label; plain: none of these."""
    random = np.random.default_rng(7)
    lines: list[dict[str, Any]] = []
    for number in range(images):
        odd = "" if plain else ("", "é", "\udcff", "\N{FOX FACE}")[number % 4]
        file, label = f"train/{number:06}{odd}.png", int(random.integers(classes))
        if not plain and number in {0, 5, IMAGES - 1}:
            lines.append({"file": file, "label": None if number == 5 else label, "refused": f"reason {number}"})
            continue
        answers = random.choice(min(classes, 1000), min(5, classes), replace=False) + max(classes - 1000, 0)
        scores = np.sort(random.random(len(answers)) * 10.0 ** -random.integers(0, 300))[::-1]
        top = [[int(index), float(score)] for index, score in zip(answers, scores, strict=True)]
        known = plain or number % 9 != 4
        place = [index for index, _ in top].index(label) + 1 if label in answers else classes
        ranks = [place] * views if views == 1 else random.integers(1, classes + 1, views).tolist()
        lines.append(
            {
                "file": file,
                "label": label if known else None,
                "top": top,
                "rank": place if known else None,
                "view_ranks": ranks if known else [],
                "capped": number % 7 == 3,
            }
        )
    return lines


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(("classes", "views"), [(1, 1), (3, 0), (1000, 6), (65_535, 2), (65_536, 2), (100_000, 54)])
def test_columns_give_back_every_line_as_it_was_read(tmp_path: Path, classes: int, views: int) -> None:
    lines = random_lines(classes, views)
    expected = [parse_prediction(json.dumps(line).encode(), classes, views) for line in lines]
    found = read_predictions(write_lines(tmp_path / "predictions.jsonl", lines), classes, views)
    assert len(found) == IMAGES
    assert list(found) == expected
    told = [json.dumps(prediction.to_json()) for prediction in found]
    assert told == [json.dumps(line) for line in lines]  # every float to its last bit, true and false as such
    for place in (0, 1, 5, 1023, 1024, IMAGES - 1, -1, -IMAGES):
        assert found[place] == expected[place]
    for part in (
        slice(None),
        slice(1020, 1030),
        slice(-3, None),
        slice(30, 20),
        slice(2400, 9999),
        slice(None, None, -7),
    ):
        assert found[part] == expected[part]
    for beyond in (IMAGES, -IMAGES - 1):
        with pytest.raises(IndexError):
            found[beyond]


def test_a_run_without_lines_is_an_empty_sequence(tmp_path: Path) -> None:
    found = read_predictions(tmp_path / "predictions.jsonl", 7, 4)
    assert (len(found), list(found), found[:]) == (0, [], [])


def test_an_image_takes_little_more_memory_than_its_numbers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "predictions.jsonl", random_lines(1000, 6, 10_000, plain=True))
    tracemalloc.start()
    try:
        found = read_predictions(path, 1000, 6)
        _, most = tracemalloc.get_traced_memory()
        its_own = tracemalloc.Filter(inclusive=True, filename_pattern=predictions.__file__)  # not that of other threads
        held = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([its_own]).traces)
    finally:
        tracemalloc.stop()
    name = len("train/000000.png")
    numbers = 5 * (8 + 2) + 6 * 2 + 4 + 2 + 1 + 8  # answers, views, label, rank, capped, where the name ends
    assert numbers + name < held / len(found) < 1.3 * (numbers + name)  # columns overallocate by an eighth
    assert most < 1.5 * held + 2**18  # nor while reading: a column is copied when it grows; the file is read in pieces
