"""The lines of a run are read as they were written."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.validation.predictions import parse_prediction, read_predictions

IMAGES = 2500


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
def test_every_line_is_read_as_it_was_written(tmp_path: Path, classes: int, views: int) -> None:
    lines = random_lines(classes, views)
    expected = [parse_prediction(json.dumps(line).encode(), classes, views) for line in lines]
    found = read_predictions(write_lines(tmp_path / "predictions.jsonl", lines), classes, views)
    assert len(found) == IMAGES
    assert list(found) == expected
    told = [json.dumps(prediction.to_json()) for prediction in found]
    assert told == [json.dumps(line) for line in lines]  # every float to its last bit, true and false as such


def test_a_run_without_lines_is_an_empty_sequence(tmp_path: Path) -> None:
    found = read_predictions(tmp_path / "predictions.jsonl", 7, 4)
    assert found == []


def test_an_image_takes_about_1_kb(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "predictions.jsonl", random_lines(1000, 6, 10_000, plain=True))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        found = read_predictions(path, 1000, 6)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 500 < (after - before) / len(found) < 1100
