"""Two models are evaluated on random portions until it is known which is better."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.datasets.open import open_dataset
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.errors import CannotTell, CheckFailed, DatasetError, Interrupted, RunFolderError, UsageError
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.reporting.checks import raise_unless_passed
from prelunet.evaluator.reporting.compare_page import write_comparison
from prelunet.evaluator.reporting.deciding import Decision, check_decision, compare_until_decided
from prelunet.evaluator.validation.portions import ComparedModel
from prelunet.evaluator.validation.run import read_run
from tests.helpers.fakes import FakeSession, fake_contract, validated

CLASSES = [entry.wnid for entry in fake_contract().classes]
IMAGES, PORTION = 150, 20
CENTER = build_protocol("center", fake_contract())
RESULT = ("run.json", "predictions.jsonl", "scores.f32.npy")


class Reading(FakeSession):
    """Reads class and number of an image from its color; takes the class for the next one if the number is in `wrong`.

    before: called with the number of each image.
    """

    def __init__(self, wrong: range, before: Callable[[int], None] = lambda _number: None, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self._wrong, self._before = wrong, before

    def compute(self, staged: Any) -> Outputs:
        images, _ = staged
        scores = np.full((len(images), len(CLASSES)), 0.02, np.float32)
        for row, (label, number, _) in enumerate(images[:, 0, 0].tolist()):
            self._before(number)
            scores[row, (label // 40 + (number in self._wrong)) % len(CLASSES)] = 0.9
        return Outputs(scores, np.log(scores), np.ones((len(images), 2), np.int64), lambda: scores[:, None, None])


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    monkeypatch.setattr("prelunet.evaluator.validation.portions.PORTION", PORTION)
    for number in range(IMAGES):
        label = number * 7 % len(CLASSES)
        path = tmp_path / "data" / CLASSES[label] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 36), (40 * label, number, 0)).save(path)
    return open_dataset(tmp_path / "data", split="val", wnids=CLASSES)


def compared(name: str, dataset: Dataset, session: FakeSession) -> ComparedModel:
    return ComparedModel(name, session, Path(f"{name}.onnx"), CENTER, dataset)  # type: ignore[arg-type]


def decided(dataset: Dataset, folder: Path, wrong_a: range, wrong_b: range, **options: Any) -> Decision:
    sides = [compared("a", dataset, Reading(wrong_a)), compared("b", dataset, Reading(wrong_b, seed=1))]
    return compare_until_decided(sides[0], sides[1], folder=folder, **{"margin": 5, **options})


NONE, HALF = range(0), range(0, IMAGES, 2)


@pytest.mark.parametrize(
    ("wrong_a", "wrong_b", "verdict"),
    [(HALF, NONE, "B is better"), (NONE, HALF, "B is worse"), (HALF, HALF, "within the margin")],
)
def test_it_stops_as_soon_as_it_is_decided_and_says_so(
    dataset: Dataset, tmp_path: Path, wrong_a: range, wrong_b: range, verdict: str
) -> None:
    lines: list[str] = []
    found = decided(dataset, tmp_path / "out", wrong_a, wrong_b, margin=30, report=lines.append)
    assert found.data["verdict"] == verdict
    assert PORTION <= found.data["images"] < IMAGES
    assert found.data["images"] % PORTION == 0
    assert [look["images"] for look in found.data["looks"]] == [*range(PORTION, found.data["images"] + 1, PORTION)]
    assert str(found).startswith(f"{verdict} after {found.data['images']} of {IMAGES} images: top-1 error ")
    assert f"{IMAGES} images; if only one model is right on 10 % of them, expected to need about" in lines[0]
    assert json.loads((tmp_path / "out" / "decision.json").read_bytes()) == found.data


def test_the_merged_runs_hold_the_images_that_were_seen_as_a_run_of_these_alone(
    dataset: Dataset, tmp_path: Path
) -> None:
    found = decided(dataset, tmp_path / "out", NONE, HALF)
    a, b = (read_run(folder) for folder in found.folders)
    assert len(a.predictions) == len(b.predictions) == found.data["images"]
    assert a.info.dataset["selection"] == f"the first {found.data['images']} of {IMAGES} images in random order"
    files = [line.file for line in b.predictions]
    assert files == sorted(set(files))
    whole = {
        line.file: line for line in validated(Reading(HALF, seed=1), dataset, CENTER, tmp_path / "all").predictions
    }
    assert [line.rank for line in b.predictions] == [whole[file].rank for file in files]
    last = found.last
    assert last["b_error"] == round(100 * sum(line.rank > 1 for line in b.predictions) / len(files), 4)
    assert last["difference"] == last["b_error"] - last["a_error"]


def test_stopped_at_any_portion_the_same_call_ends_in_the_same_bytes(dataset: Dataset, tmp_path: Path) -> None:
    decided(dataset, tmp_path / "whole", range(0, IMAGES, 9), range(3, IMAGES, 9), margin=8)
    for after in (3, 45, 70):
        calls = 0

        def stop(_number: int) -> None:
            nonlocal calls
            calls += 1
            if calls == after:  # noqa: B023 - called within this round
                raise KeyboardInterrupt

        folder = tmp_path / f"stopped{after}"
        a = compared("a", dataset, Reading(range(0, IMAGES, 9), stop))
        b = compared("b", dataset, Reading(range(3, IMAGES, 9), seed=1))
        with pytest.raises(Interrupted):
            compare_until_decided(a, b, folder=folder, margin=8)
        decided(dataset, folder, range(0, IMAGES, 9), range(3, IMAGES, 9), margin=8)
        for name in ("decision.json", *(f"{side}/{file}" for side in "ab" for file in RESULT)):
            assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_smaller_margin_goes_on_with_what_was_seen(dataset: Dataset, tmp_path: Path) -> None:
    first = decided(dataset, tmp_path / "out", HALF, HALF, margin=40)
    seen: list[int] = []
    a, b = (compared(side, dataset, Reading(HALF, seen.append, seed=n)) for n, side in enumerate("ab"))
    second = compare_until_decided(a, b, folder=tmp_path / "out", margin=10)
    assert first.data["images"] < second.data["images"]
    assert len(seen) == 2 * (second.data["images"] - first.data["images"])
    assert len(read_run(tmp_path / "out" / "b").predictions) == second.data["images"]


def test_what_does_not_fit_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--margin 0.5: one of {IMAGES} images is already 0.67 points"):
        decided(dataset, tmp_path / "out", NONE, HALF, margin=0.5)
    decided(dataset, tmp_path / "out", NONE, HALF)
    with pytest.raises(RunFolderError, match=r"holds another comparison:\n +seed: 0 in the folder, 1 now"):
        decided(dataset, tmp_path / "out", NONE, HALF, seed=1)
    (tmp_path / "data" / dataset.samples[3].file).unlink()
    fewer = open_dataset(tmp_path / "data", split="val", wnids=CLASSES)
    with pytest.raises(
        RunFolderError, match=f"begun with other images or labels: {IMAGES} images then, {IMAGES - 1} now"
    ):
        decided(fewer, tmp_path / "out", NONE, HALF)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="not empty and not a comparison"):
        decided(dataset, tmp_path / "full", NONE, HALF)
    (tmp_path / "out" / "decision.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"decision\.json: damaged"):
        decided(dataset, tmp_path / "out", NONE, HALF)
    some = open_dataset(tmp_path / "data", split="val", wnids=[*CLASSES[1:], CLASSES[0]])
    sides = [compared("a", dataset, Reading(NONE)), compared("b", some, Reading(NONE))]
    with pytest.raises(DatasetError, match=r"differ between a\.onnx and b\.onnx"):
        compare_until_decided(sides[0], sides[1], folder=tmp_path / "new", margin=5)


def test_an_image_that_changes_meanwhile_stops_it_and_nothing_is_lost(dataset: Dataset, tmp_path: Path) -> None:
    last = tmp_path / "data" / dataset.samples[-1].file
    kept = last.read_bytes()

    def change(_number: int) -> None:
        last.write_bytes(kept + b"more")

    a, b = (compared(side, dataset, Reading(HALF, change, seed=n)) for n, side in enumerate("ab"))
    with pytest.raises(DatasetError, match="Do not change the images while they are in use"):
        compare_until_decided(a, b, folder=tmp_path / "out", margin=1)
    last.write_bytes(kept)
    seen: list[int] = []
    a, b = (compared(side, dataset, Reading(HALF, seen.append, seed=n)) for n, side in enumerate("ab"))
    found = compare_until_decided(a, b, folder=tmp_path / "out", margin=1)
    assert len(seen) < 2 * found.data["images"]


@pytest.mark.parametrize(
    ("wrong_b", "limit", "error"),
    [(range(0, 45), 10, CheckFailed), (range(0, 9), 20, None), (range(0, 45), 50, None)],
)
def test_a_limit_is_what_it_stops_at_though_the_better_model_is_known_before(
    dataset: Dataset, tmp_path: Path, wrong_b: range, limit: float, error: type[Exception] | None
) -> None:
    """B is worse by 30 or 6 points."""
    found = decided(dataset, tmp_path / "out", NONE, wrong_b, limit=limit)
    low, high = found.last["interval"]
    assert low > limit or high <= limit
    assert all(each["interval"][0] <= limit < each["interval"][1] for each in found.data["looks"][:-1])
    if error is None:
        raise_unless_passed([check_decision(found, limit)])
    else:
        with pytest.raises(error, match=r"points above A's, between .* with 95 % confidence"):
            raise_unless_passed([check_decision(found, limit)])


def test_after_all_images_the_verdict_is_that_of_compare(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven more errors among 150 images may be chance, so nobody can tell for others like these."""
    monkeypatch.setattr("prelunet.evaluator.validation.portions.PORTION", IMAGES // 2)
    wrong_a, wrong_b = range(0, IMAGES, 15), range(4, IMAGES, 9)
    found = decided(dataset, tmp_path / "out", wrong_a, wrong_b, margin=1)
    assert found.data["images"] == IMAGES
    assert found.data["verdict"] == "cannot tell"
    comparison = write_comparison(*found.folders, out=tmp_path / "page").comparison
    assert comparison["top1"]["interval"] == found.last["interval"]
    assert comparison["dataset"]["selection"] is None
    with pytest.raises(CannotTell, match="cannot tell if B is worse than A by more than 5 points"):
        raise_unless_passed([check_decision(found, 5)])
    with pytest.raises(CheckFailed):
        raise_unless_passed([check_decision(found, 2)])
    same = decided(dataset, tmp_path / "same", wrong_a, wrong_a, margin=1)
    assert same.data["images"] == IMAGES
    raise_unless_passed([check_decision(same, 0)])  # no answer changed


def test_images_that_one_model_refuses_leave_the_rest_open(dataset: Dataset, tmp_path: Path) -> None:
    for sample in dataset.samples[::5]:
        file = tmp_path / "data" / sample.file
        file.write_bytes(b"x" * len(file.read_bytes()))
    found = decided(dataset, tmp_path / "out", NONE, NONE, margin=1)
    assert found.last["refused"] == [IMAGES // 5, IMAGES // 5]
    assert f"A refused {IMAGES // 5} images" in str(found)


def test_a_run_that_was_stopped_shows_its_pictures_and_warns_of_its_intervals(dataset: Dataset, tmp_path: Path) -> None:
    found = decided(dataset, tmp_path / "out", NONE, HALF)
    assert found.data["images"] < IMAGES
    written = write_comparison(*found.folders, out=tmp_path / "page")
    assert "on which compare --until-decided stopped" in str(written)
    page = written.html.read_text()
    assert "on which compare --until-decided stopped" in page
    assert "have been moved or changed" not in page
    assert "data:image" in page
