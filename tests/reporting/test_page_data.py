"""The data of the page's scripts: compact, complete, and assigned to the right class and image."""

import base64
import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from prelunet.evaluator.reporting import gallery as pictures
from prelunet.evaluator.reporting import page_data as module
from prelunet.evaluator.reporting.gallery import PICTURE_BYTES, TILE, Gallery, build_gallery
from prelunet.evaluator.reporting.page_data import fair_share, page_data, split_affixes
from prelunet.evaluator.reporting.report import build_report
from prelunet.evaluator.reporting.report_page import render_page
from prelunet.evaluator.validation.mistakes import mistakes_as_shown, mistakes_round_robin
from prelunet.evaluator.validation.predictions import Prediction
from prelunet.evaluator.validation.run import Run, read_run
from tests.helpers.run_folders import evaluated, refused, write_heat_maps, write_run
from tests.reporting.pages import fingerprint_of, make_images

COUNT = 7  # classes of run_folders


def random_lines(images: int, seed: int) -> list[dict[str, Any]]:
    """Return lines of every kind: right, wrong inside and outside the answers, refused, capped, few answers."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(images):
        label = int(rng.integers(0, COUNT - 1))  # the last class has no images
        file = f"n0{label + 1}/ILSVRC2012_val_{int(rng.integers(0, 10**8)):08}.JPEG"
        if rng.random() < 0.1:
            lines.append(refused(file, label, f"reason {number}"))
            continue
        order = rng.permutation(COUNT).tolist()
        answers = order[: int(rng.integers(1, 6))]
        rank = order.index(label) + 1
        view_ranks = rng.integers(1, COUNT + 1, 4).tolist()
        line = evaluated(file, label, answers, rank, first=float(rng.uniform(0.3, 1)), view_ranks=view_ranks)
        lines.append({**line, "capped": bool(rng.random() < 0.2)})
    return lines


def run_of(folder: Path, lines: list[dict[str, Any]], **rest: Any) -> Run:
    return read_run(write_run(folder, lines, **rest))


def data_of(run: Run, gallery: Gallery | None = None) -> dict[str, Any]:
    """Return the data as a script reads it, after a round trip through JSON."""
    data: dict[str, Any] = json.loads(
        json.dumps(page_data(build_report(run), run, gallery or build_gallery(run, None)))
    )
    return data


def images_of(data: dict[str, Any], label: int) -> list[dict[str, Any]]:
    """Decode the images of a class."""
    beginning, end, middles, ranks, width, answers, scores, reasons, capped = data["images"][label]
    images = []
    for number, middle in enumerate(middles):
        image: dict[str, Any] = {"file": beginning + middle + end}
        if number < len(ranks):
            own = slice(number * width, (number + 1) * width)
            image["top"] = list(zip(answers[own], scores[own], strict=True))
            image |= {"rank": ranks[number], "capped": number in capped}
        else:
            image["refused"] = reasons[number - len(ranks)]
        images.append(image)
    return images


def test_every_image_is_listed_completely_under_its_class_mistakes_first(tmp_path: Path) -> None:
    run = run_of(tmp_path, random_lines(300, seed=1))
    data = data_of(run)
    for label in range(COUNT):
        own = [prediction for prediction in run.predictions if prediction.label == label]
        wrong = sorted((p for p in own if p.rank > 1), key=lambda p: (-p.top[0][1], p.file))
        right = sorted((p for p in own if p.rank == 1), key=lambda p: (p.top[0][1], p.file))
        unseen = sorted((p for p in own if p.refused), key=lambda p: p.file)
        images = images_of(data, label)
        assert [image["file"] for image in images] == [p.file for p in (*wrong, *right, *unseen)]
        for image, prediction in zip(images, (*wrong, *right, *unseen), strict=True):
            assert image.get("refused") == prediction.refused
            if prediction.refused is None:
                assert (image["rank"], image["capped"]) == (prediction.rank, prediction.capped)
                assert [index for index, _ in image["top"]] == [index for index, _ in prediction.top]
                for (_, given), (_, score) in zip(image["top"], prediction.top, strict=True):
                    assert given == pytest.approx(1000 * score, abs=0.5)  # three digits


def test_a_score_a_little_above_one_is_shown_as_one(tmp_path: Path) -> None:
    line = evaluated("n01/a.png", 0, [0], 1)
    line["top"][0] = [0, 1.0008]  # half precision
    assert images_of(data_of(run_of(tmp_path, [line])), 0)[0]["top"][0] == (0, 1000)


def test_all_confusions_are_counted_those_of_hidden_images_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTED_IMAGES", 10)
    run = run_of(tmp_path, random_lines(200, seed=2))
    data = data_of(run)
    for label in range(COUNT):
        counts = Counter(p.top[0][0] for p in run.predictions if p.label == label and p.rank > 1)
        flat = data["taken"][label]
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        assert pairs == sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    assert sum(len(images_of(data, label)) for label in range(COUNT)) <= 10


def test_of_too_many_images_every_class_keeps_its_first_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, random_lines(120, seed=3))
    whole = data_of(run)
    monkeypatch.setattr(module, "MAX_LISTED_IMAGES", 30)
    cut = data_of(run)
    share = fair_share([len(images_of(whole, label)) for label in range(COUNT)], 30)
    assert 1 < share < 20
    for label in range(COUNT):
        assert images_of(cut, label) == images_of(whole, label)[:share]


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 100))
def test_fair_share_is_the_largest_that_fits(counts: list[int], total: int) -> None:
    def taken(share: int) -> int:
        return sum(min(count, share) for count in counts)

    share = fair_share(counts, total)
    assert taken(share) <= total or share == 1
    assert taken(share + 1) > total or taken(share + 1) == taken(share)


@given(st.lists(st.text("ab/é.0", max_size=6), max_size=5))
def test_folded_names_unfold_to_themselves(names: list[str]) -> None:
    beginning, end, middles = split_affixes(names)
    assert [beginning + middle + end for middle in middles] == names
    if len(names) > 1:
        assert len({middle[:1] for middle in middles}) > 1 or "" in middles
        assert len({middle[-1:] for middle in middles}) > 1 or "" in middles


def test_classes_carry_the_numbers_of_the_report(tmp_path: Path) -> None:
    run = run_of(tmp_path, random_lines(150, seed=4))
    report, data = build_report(run), data_of(run)
    for entry, row in zip(report["classes"], data["classes"], strict=True):
        wnid, name, images, seen, wrong1, low1, high1, wrong5, low5, high5, confidence, median, views = row
        assert (wnid, name, images, seen) == (entry["wnid"], entry["name"], entry["images"], entry["evaluated"])
        assert (wrong1, wrong5, median) == (entry["top1_wrong"], entry["top5_wrong"], entry["median_rank"])
        if not seen:
            assert [low1, high1, low5, high5, confidence] == [None] * 5
            continue
        assert [low1, high1] == entry["top1_interval"], "not rounded: they are compared with the run's error"
        assert [low5, high5] == entry["top5_interval"]
        assert confidence == round(entry["confidence"], 1)
        assert views == [view[key] for key in ("top1_error", "top5_error") for view in entry["views"]]
    assert data["shared"] == [[1, 3]]
    assert [view[0] for view in data["views"]] == ["256", "256 mirrored", "384", "384 mirrored"]


def size_of(address: str) -> tuple[int, int]:
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).size


def test_tiles_keep_to_their_budget_and_belong_to_their_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for line in random_lines(160, seed=5) if "refused" not in line]
    data = make_images(tmp_path / "data", {line["file"]: (150, 90) for line in lines})
    run = run_of(tmp_path / "run", lines, fingerprint=fingerprint_of(data))
    free = build_gallery(run, data)
    large = {mistake.prediction.file for mistake in free.mistakes}
    in_turns = [p.file for p in mistakes_round_robin(run.predictions) if p.file not in large]
    assert list(free.tiles) == in_turns
    sizes = [len(free.tiles[file]) for file in in_turns]
    budget = sum(len(m.thumbnail or "") for m in free.mistakes) + sum(sizes[:9]) + sizes[9] // 2
    monkeypatch.setattr(pictures, "PICTURE_BYTES", budget)
    gallery = build_gallery(run, data)
    assert gallery.mistakes == free.mistakes
    assert list(gallery.tiles) == in_turns[:9]  # the tenth exceeds the budget
    shown = data_of(run, gallery)
    for key, tile in shown["tiles"].items():
        label, place = map(int, key.split("-"))
        assert gallery.tiles[images_of(shown, label)[place]["file"]] == tile
    assert len(shown["tiles"]) == 9
    for key, number in shown["large"].items():
        label, place = map(int, key.split("-"))
        assert images_of(shown, label)[place]["file"] == gallery.mistakes[number].prediction.file
    assert len(shown["large"]) == len(gallery.mistakes)


def test_tiles_are_smaller_than_the_pictures_of_the_gallery(tmp_path: Path) -> None:
    lines = [evaluated(f"n01/{number:03}.JPEG", 0, [2, 0], 2, first=0.9 - number / 100) for number in range(5)]
    data = make_images(tmp_path / "data", {line["file"]: (150, 90) for line in lines})
    gallery = build_gallery(run_of(tmp_path / "run", lines, fingerprint=fingerprint_of(data)), data)
    assert [size_of(mistake.thumbnail or "") for mistake in gallery.mistakes] == [(150, 90)] * 3
    assert [size_of(tile) for tile in gallery.tiles.values()] == [(TILE, 67)] * 2


def test_mistakes_take_turns_by_class(tmp_path: Path) -> None:
    run = run_of(tmp_path, random_lines(200, seed=6))
    turns = mistakes_round_robin(run.predictions)
    assert sorted(p.file for p in turns) == sorted(p.file for p in run.predictions if p.rank > 1)
    expected: list[str] = []
    left = sorted((p for p in run.predictions if p.rank > 1), key=lambda p: (-p.top[0][1], p.file))
    while left:
        seen: set[int] = set()
        turn = [p for p in left if p.label not in seen and not seen.add(p.label)]  # type: ignore[func-returns-value]
        expected += [p.file for p in turn]
        left = [p for p in left if p not in turn]
    assert [p.file for p in turns] == expected


def test_a_page_of_fifty_thousand_images_and_a_thousand_classes_is_under_eight_megabytes(tmp_path: Path) -> None:
    small = run_of(tmp_path, [evaluated("a.png", 0, [1, 0], 2)])
    classes = tuple(replace(small.info.classes[0], wnid=f"n{index:08}", name=f"a name of usual length {index}")
                    for index in range(1000))  # fmt: skip
    rng = np.random.default_rng(7)
    predictions = []
    for number, file in enumerate(sorted(rng.choice(10**8, 50_000, replace=False).tolist())):
        label = number // 50
        answers = rng.choice(1000, 5, replace=False).tolist()
        rank = answers.index(label) + 1 if label in answers else 700
        top = tuple((index, 0.5 / (place + 1.7)) for place, index in enumerate(answers))
        predictions.append(Prediction(f"n{label:08}/ILSVRC2012_val_{file:08}.JPEG", label, top, rank, (rank,) * 4))
    dataset = {**small.info.dataset, "images": len(predictions)}
    run = Run(replace(small.info, classes=classes, dataset=dataset), predictions)
    gallery = build_gallery(run, None)
    tile = "data:image/webp;base64," + "A" * 4000
    files = [p.file for p in mistakes_round_robin(predictions)[: PICTURE_BYTES // len(tile)]]
    page = render_page(build_report(run), run, replace(gallery, tiles=dict.fromkeys(files, tile)))
    assert len(page) < 8_000_000


def test_heat_maps_are_assigned_to_their_images(tmp_path: Path) -> None:
    lines = random_lines(300, seed=3)
    folder = write_run(tmp_path, lines)
    assert data_of(read_run(folder))["heatmaps"] == {}
    order = [p.file for p in mistakes_as_shown(read_run(folder).predictions)][:60]
    by_file = {line["file"]: line for line in lines}
    maps = [[[[number, 255, 9], [3, 4, 254]], [[7, 8, 0], [1, 2, number]]] for number in range(60)]
    write_heat_maps(folder, [(by_file[order[n]], (40 + n, 61), maps[n]) for n in range(60)])
    data = data_of(read_run(folder))
    assert len(data["heatmaps"]) == 60
    for key, (height, width, columns, *both) in data["heatmaps"].items():
        label, place = map(int, key.split("-"))
        number = order.index(images_of(data, label)[place]["file"])
        assert (height, width, columns) == (40 + number, 61, 3)
        assert [list(base64.b64decode(text)) for text in both] == [[*above, *below] for above, below in maps[number]]
