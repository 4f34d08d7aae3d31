"""Each protocol against protocol_oracle.py, with exported nets; and proof that the comparison can fail."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from prelunet.evaluator.engine import classify, scores
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.memory import gpu_rules
from prelunet.evaluator.engine.protocol_costs import paper_contract
from prelunet.evaluator.engine.session import Outputs, Session
from prelunet.evaluator.imaging import resize, views
from prelunet.evaluator.protocols import EvaluationProtocol, ProtocolOverrides, build_protocol
from tests.conftest import ExportedNet
from tests.engine import protocol_oracle
from tests.engine.protocol_oracle import CORNERS_AND_CENTER, Oracle, OracleView, average, softmax
from tests.helpers.discriminating_nets import noise
from tests.helpers.fakes import FakeSession

TOLERANCE = 1e-5  # float32 through the net; 3e-6 was measured on dense scores

# Landscape, portrait, square, beyond 1:4 both ways, smaller than the crop. Odd and even remainders beside the crop, odd
# and even numbers of windows. Sides of the elongated ones let Pillow's box begin at a whole pixel: elsewhere a gray
# level may round the other way (test_resize.py), which is no matter of protocols.
SHAPES = [(45, 66), (91, 52), (40, 40), (20, 160), (130, 13), (9, 11)]
IMAGES = [noise(height, width, seed=place) for place, (height, width) in enumerate(SHAPES)]

SPP_NET = (28, 32, 38, 45, 56, 70)  # 224, 256, 300, 360, 448, 560, an eighth of each, halves upwards
RESNET = (28, 32, 48, 60, 80)


@dataclass(frozen=True)
class Case:
    """A protocol as requested, and the same as a call of the oracle."""

    name: str
    evaluate: Callable[[Oracle, np.ndarray], list[OracleView]]
    changes: dict[str, Any] = field(default_factory=dict)
    averaging: str = "softmax"
    weights: str = "scale"

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.changes.items())])


def dense(*scales: int, mirror: bool = True) -> Callable[[Oracle, np.ndarray], list[OracleView]]:
    return lambda oracle, image: oracle.dense(image, scales, mirror)


def nine(*scales: int, mirror: bool = True) -> Callable[[Oracle, np.ndarray], list[OracleView]]:
    return lambda oracle, image: oracle.nine(image, scales, mirror)


def ten(*scales: int, mirror: bool = True) -> Callable[[Oracle, np.ndarray], list[OracleView]]:
    return lambda oracle, image: oracle.crops(image, scales, CORNERS_AND_CENTER, mirror)


def one(*scales: int, mirror: bool = False) -> Callable[[Oracle, np.ndarray], list[OracleView]]:
    return lambda oracle, image: oracle.crops(image, scales, ["center"], mirror)


LOGIT, NO_FLIP = {"averaging": "logit"}, {"mirror": False}
CASES = [
    Case("center", one(32)),
    Case("center", one(32, mirror=True), {"mirror": True}),
    Case("center-45", one(45)),
    Case("ten-crop", ten(32)),
    Case("ten-crop", ten(32, mirror=False), NO_FLIP),
    Case("ten-crop", ten(32), LOGIT, averaging="logit"),
    Case("ten-crop", ten(28, 41), {"scales": (28, 41)}),
    Case("multi-scale", dense(32, 48, 60)),
    Case("multi-scale", dense(32, 48, 60, mirror=False), NO_FLIP),
    Case("multi-scale", dense(32, 48, 60), LOGIT, averaging="logit"),
    Case("multi-scale", dense(32, 48, 60), {"weights": "view"}, weights="view"),
    Case("multi-scale", dense(32, 48, 60), {"weights": "view", **LOGIT}, averaging="logit", weights="view"),
    Case("multi-scale", dense(45, 30), {"scales": (45, 30)}),
    Case("dense-33", dense(33)),
    Case("dense-28-48", dense(28, 48)),
    Case("dense-28-48", dense(28, 48, mirror=False), NO_FLIP),
    Case("spp-18", nine(*SPP_NET), weights="view"),
    Case("spp-18", nine(*SPP_NET, mirror=False), NO_FLIP, weights="view"),
    Case("spp-18", nine(*SPP_NET), LOGIT, averaging="logit", weights="view"),
    Case("spp-18", nine(*SPP_NET), {"weights": "scale"}),
    Case("spp-18-28-33", nine(28, 33), weights="view"),
    Case("spp-net", dense(*SPP_NET)),
    Case("resnet", dense(*RESNET)),
]


@pytest.fixture(scope="module")
def oracle(exported: dict[str, ExportedNet]) -> Oracle:
    return oracle_of(exported["narrow-image"])


def oracle_of(exported: ExportedNet) -> Oracle:
    checkpoint = exported.checkpoint
    return Oracle(exported.name, exported.tensors, checkpoint.mean, checkpoint.architecture.crop)


def with_shared_canvases(session: Session) -> Session:
    """Return the same session, treated as on a GPU: views of different shapes share ragged canvases."""
    shared = copy(session)
    shared.rules = gpu_rules(session.contract, None)
    return shared


def assert_equals_oracle(
    session: Session,
    oracle: Oracle,
    case: Case,
    images: Sequence[np.ndarray] = IMAGES,
    protocol: EvaluationProtocol | None = None,
) -> None:
    """Compare each view and the average of all, of all images at once."""
    protocol = protocol or build_protocol(case.name, session.contract, ProtocolOverrides(**case.changes))
    for image, found in zip(images, classify_images(session, images, protocol), strict=True):
        seen = case.evaluate(oracle, image)
        assert [view.windows[0] * view.windows[1] for view in found.views] == [len(view.logits) for view in seen]
        assert [view.view.scale for view in found.views] == [view.scale for view in seen]
        for view, expected in zip(found.views, seen, strict=True):
            close(view.scores, expected.probabilities.mean(axis=0))
            close(softmax(view.logits.astype(np.float64)), softmax(expected.logits.mean(axis=0)))
        close(found.scores, average(seen, case.averaging, case.weights))


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_protocol_equals_the_oracle_when_images_of_all_shapes_share_batches(
    exported: dict[str, ExportedNet], oracle: Oracle, case: Case
) -> None:
    assert_equals_oracle(with_shared_canvases(exported["narrow-image"].session), oracle, case)


@pytest.mark.parametrize("case", [case for case in CASES if not case.changes], ids=str)
def test_a_protocol_equals_the_oracle_in_a_file_without_masks(
    exported: dict[str, ExportedNet], oracle: Oracle, case: Case
) -> None:
    assert_equals_oracle(exported["narrow-exact"].session, oracle, case)


@pytest.mark.parametrize(
    "case",
    [
        Case("ten-crop", ten(256)),
        Case("spp-18-224-240", nine(224, 240), weights="view"),
        Case("spp-18-240", nine(240), LOGIT, averaging="logit", weights="view"),
    ],
    ids=str,
)
def test_protocols_of_model_e_with_few_channels_equal_the_oracle(exported: dict[str, ExportedNet], case: Case) -> None:
    session = exported["slimE-image"].session
    assert_equals_oracle(session, oracle_of(exported["slimE-image"]), case, [noise(261, 203, seed=4)])


def test_an_adopted_nets_filter_is_used(
    exported: dict[str, ExportedNet], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    bicubic = copy(exported["narrow-image"].session)
    bicubic.contract = replace(bicubic.contract, interpolation="bicubic")
    plain = protocol_oracle.resized
    monkeypatch.setattr(
        protocol_oracle, "resized", lambda image, scale: plain(image, scale, filter_=Image.Resampling.BICUBIC)
    )
    assert build_protocol("ten-crop", bicubic.contract).interpolation == "bicubic"
    assert_equals_oracle(bicubic, oracle, Case("ten-crop", ten(32)))


def test_the_oracle_distinguishes_the_images(oracle: Oracle) -> None:
    answers = [average(oracle.dense(image, (32, 48, 60))) for image in IMAGES]
    assert min(answer.max() * len(answer) for answer in answers) > 1.5  # 1: every class alike
    for place, answer in enumerate(answers):
        assert all(np.abs(answer - other).max() > 100 * TOLERANCE for other in answers[:place])


# --- mistakes, one at a time -----------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def corners_swapped(patch: pytest.MonkeyPatch) -> None:
    right = views.crop_origin
    swapped = {"top-left": "top-right", "top-right": "top-left"}
    patch.setattr(views, "crop_origin", lambda h, w, part, *more: right(h, w, swapped.get(part, part), *more))


def rows_and_columns_swapped(patch: pytest.MonkeyPatch) -> None:
    right = views.crop_origin
    swapped = {"top-right": "bottom-left", "bottom-left": "top-right"}
    patch.setattr(views, "crop_origin", lambda h, w, part, *more: right(h, w, swapped.get(part, part), *more))


def center_rounded_up(patch: pytest.MonkeyPatch) -> None:
    right = views.crop_origin

    def wrong(height: int, width: int, part: Any, *more: Any) -> tuple[int, int]:
        return right(height + 1, width + 1, part, *more) if part == "center" else right(height, width, part, *more)

    patch.setattr(views, "crop_origin", wrong)


def mirrored_before_it_is_cropped(patch: pytest.MonkeyPatch) -> None:
    right = views.crop_at

    def wrong(image: np.ndarray, part: Any, *more: Any) -> np.ndarray:
        return right(image[:, ::-1], part, *more)[:, ::-1]

    patch.setattr(views, "crop_at", wrong)


def not_mirrored(patch: pytest.MonkeyPatch) -> None:
    right = classify.make_views

    def wrong(image: np.ndarray, protocol: EvaluationProtocol) -> list[views.ViewImage]:
        made = right(image, protocol)
        plain = {(view.view.scale, view.view.part): view.image for view in made if not view.view.mirrored}
        return [structs.replace(view, image=plain[view.view.scale, view.view.part]) for view in made]

    patch.setattr(classify, "make_views", wrong)


def middle_rounded_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scores, "nine_places", lambda side: sorted({0, side // 2, side - 1}))


def nine_without_the_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scores, "nine_places", lambda side: sorted({0, (side - 1) // 2, max(0, side - 2)}))


def weights_exchanged(patch: pytest.MonkeyPatch) -> None:
    right = classify.view_weights
    other = {"scale": "view", "view": "scale"}
    patch.setattr(classify, "view_weights", lambda seen, windows, weights: right(seen, windows, other[weights]))


def views_weigh_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(classify, "view_weights", lambda seen, windows, weights: np.full(len(seen), 1 / len(seen)))


def averaging_exchanged(patch: pytest.MonkeyPatch) -> None:
    right = classify.average_views
    other = {"softmax": "logit", "logit": "softmax"}
    patch.setattr(
        classify,
        "average_views",
        lambda all_scores, logits, weights, kind: right(all_scores, logits, weights, other[kind]),
    )


def capped_at_the_beginning(patch: pytest.MonkeyPatch) -> None:
    right = resize._source_span

    def wrong(side: int, full: int, _offset: int, count: int, support: int) -> tuple[int, int, float, float]:
        return right(side, full, 0, count, support)

    patch.setattr(resize, "_source_span", wrong)


@pytest.mark.parametrize(
    ("mistake", "name", "changes"),
    [
        (corners_swapped, "ten-crop", {}),
        (rows_and_columns_swapped, "ten-crop", {}),
        (center_rounded_up, "center", {}),
        (center_rounded_up, "ten-crop", {}),
        (mirrored_before_it_is_cropped, "ten-crop", {}),
        (not_mirrored, "ten-crop", {}),
        (not_mirrored, "multi-scale", {}),
        (not_mirrored, "spp-18", {}),
        (middle_rounded_up, "spp-18", {}),
        (nine_without_the_last, "spp-18", {}),
        (weights_exchanged, "multi-scale", {}),
        (weights_exchanged, "spp-18", {}),
        (views_weigh_the_same, "spp-18", {}),
        (averaging_exchanged, "multi-scale", {}),
        (averaging_exchanged, "spp-18", LOGIT),
        (capped_at_the_beginning, "ten-crop", {}),
        (capped_at_the_beginning, "dense-33", {}),
    ],
)
def test_a_mistake_is_caught(
    exported: dict[str, ExportedNet],
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Patch,
    name: str,
    changes: dict[str, Any],
) -> None:
    (case,) = [case for case in CASES if (case.name, case.changes) == (name, changes)]
    session = exported["narrow-image"].session
    assert_equals_oracle(session, oracle, case)
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        assert_equals_oracle(session, oracle, case)


# --- SPP-net's 96 views ----------------------------------------------------------------------------------------------


class GridSession(FakeSession):
    """A session with the sizes of models A, B and C with the same scores for every window."""

    def __init__(self) -> None:
        super().__init__(paper_contract())

    def compute(self, staged: Any) -> Outputs:
        images, _ = staged
        grid = self.contract.window_grid(*images.shape[1:3])
        one = np.ones((len(images), 1), np.float32)
        return Outputs(one, one, np.array([grid] * len(images)), lambda: np.ones((len(images), *grid, 1), np.float32))


def windows_by_scale(height: int, width: int) -> dict[int, int]:
    """Count the windows that spp-18 averages of an image, plain and mirrored, by scale."""
    image = np.zeros((height, width, 3), np.uint8)
    (found,) = classify_images(GridSession(), [image], build_protocol("spp-18", paper_contract()))
    counts: dict[int, int] = {}
    for view in found.views:
        counts[view.view.scale] = counts.get(view.view.scale, 0) + view.windows[0] * view.windows[1]
    return counts


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (500, 333), (426, 640)])
def test_spp_18_of_a_large_model_averages_spp_nets_96_views_six_of_them_at_224(height: int, width: int) -> None:
    counts = windows_by_scale(height, width)
    assert counts == {224: 6, 256: 18, 300: 18, 360: 18, 448: 18, 560: 18}
    assert sum(counts.values()) == 96


def test_spp_18_of_a_square_image_has_one_window_at_224_and_its_mirror_image() -> None:
    assert windows_by_scale(500, 500) == {224: 2, 256: 18, 300: 18, 360: 18, 448: 18, 560: 18}
