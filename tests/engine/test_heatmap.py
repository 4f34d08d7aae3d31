"""Positions of windows in an image, against receptive fields traced cell by cell; and the picture of heat maps."""

import io

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from prelunet.evaluator.engine.classify import Classification, ViewResult, classify_images
from prelunet.evaluator.engine.heatmap import apply_color_map, draw_heat_maps, heat_maps, png_bytes, window_centers
from prelunet.evaluator.imaging.resize import panel_picture
from prelunet.evaluator.protocols import EvaluationProtocol, View, build_protocol
from tests.engine.contracts import build_contract
from tests.helpers.fakes import FakeSession, fake_contract

CONTRACT = fake_contract()


@pytest.mark.parametrize("name", ["A", "E", "demo"])
def test_a_window_is_centered_on_the_mean_of_its_cells_receptive_fields(name: str) -> None:
    contract = build_contract(name)
    centers = []
    for first_cell in range(4):
        middles = []
        for cell in range(first_cell, first_cell + contract.window):
            low = high = cell
            for layer in reversed(contract.trunk):
                low, high = layer.stride * low - layer.pad, layer.stride * high - layer.pad + layer.kernel - 1
            middles.append((low + high) / 2)
        centers.append(sum(middles) / len(middles))
    np.testing.assert_allclose(window_centers(contract, 4), centers)


def test_the_first_window_of_model_a_lies_at_pixel_111_and_the_next_16_further() -> None:
    np.testing.assert_array_equal(window_centers(build_contract("A"), 3), [111, 127, 143])


def view_with(scores: np.ndarray, scale: int, size: tuple[int, int], *, mirrored: bool = False) -> ViewResult:
    """Make a view from window scores, (rows, columns), of class 1 of 2; columns given as in the plain view."""
    if mirrored:
        scores = scores[:, ::-1]
    both = np.stack([1 - scores, scores], axis=-1).astype(np.float32)
    return ViewResult(
        View(scale, mirrored), *size, False, scores.shape, both.mean(axis=(0, 1)), both.mean(axis=(0, 1)), both
    )


def classified(*views: ViewResult) -> Classification:
    return Classification(views[0].scores, views, "softmax")


# 48x64 pixels at scale 48 are 12x16 cells, so 6x10 windows, centered at 13.5 + 4·i (start 1.5, 3 cells of 4 px further)
PROTOCOL = EvaluationProtocol("dense-48", "dense", (48,), mirror=True)


def test_centers_of_demo_windows_are_where_the_next_tests_expect_them() -> None:
    np.testing.assert_array_equal(window_centers(CONTRACT, 3), [13.5, 17.5, 21.5])


def test_a_map_is_highest_at_the_center_of_the_one_window_that_sees_the_class() -> None:
    scores = np.zeros((6, 10))
    scores[2, 7] = 1  # at row 21.5, column 41.5 of the view
    (heat,) = heat_maps(classified(view_with(scores, 48, (48, 64))), [1], (48, 64), (48, 64), CONTRACT, PROTOCOL)
    row, column = np.unravel_index(np.argmax(heat), heat.shape)
    assert (int(row), int(column)) in {(r, c) for r in (21, 22) for c in (41, 42)}
    # Four pixels around a center that lies between them: each is half a pixel of four from it, in both directions.
    np.testing.assert_allclose(heat[21:23, 41:43], (1 - 0.5 / 4) ** 2)
    assert heat[17, 41] == 0 or heat[17, 41] < 0.1
    assert heat[13, 30] == 0


def test_between_centers_a_map_is_interpolated_and_beyond_them_it_stays() -> None:
    scores = np.random.default_rng(2).random((6, 10))
    (heat,) = heat_maps(classified(view_with(scores, 48, (48, 64))), [1], (48, 64), (48, 64), CONTRACT, PROTOCOL)
    for row, column in [(20, 33), (0, 0), (47, 63), (30, 2), (14, 25)]:
        y, x = np.clip((row - 13.5) / 4, 0, 5), np.clip((column - 13.5) / 4, 0, 9)
        top, left = min(int(y), 4), min(int(x), 8)
        a, b = y - top, x - left
        corners = scores[top : top + 2, left : left + 2].astype(np.float32)
        expected = (
            (1 - a) * (1 - b) * corners[0, 0]
            + (1 - a) * b * corners[0, 1]
            + a * (1 - b) * corners[1, 0]
            + a * b * corners[1, 1]
        )
        np.testing.assert_allclose(heat[row, column], expected, rtol=1e-6)  # float32 scores


def test_a_mirrored_view_is_flipped_back() -> None:
    scores = np.random.default_rng(2).random((6, 10))
    size = (48, 64)
    mirrored = view_with(scores, 48, size, mirrored=True)
    (heat,) = heat_maps(classified(mirrored), [1], size, size, CONTRACT, PROTOCOL)
    # The mirrored view's own map, read from right to left: its windows are centered half a pixel off the plain one's.
    (unflipped,) = heat_maps(
        classified(replace(mirrored, view=View(48, mirrored=False))), [1], size, size, CONTRACT, PROTOCOL
    )
    np.testing.assert_allclose(heat, unflipped[:, ::-1], rtol=1e-12)
    assert not np.allclose(heat, unflipped, atol=0.05)


def test_scales_count_alike_whatever_their_number_of_windows() -> None:
    small = view_with(np.full((2, 3), 0.2), 32, (32, 43))
    small_mirrored = view_with(np.full((2, 3), 0.4), 32, (32, 43), mirrored=True)
    large = view_with(np.full((6, 10), 0.9), 48, (48, 64))
    heat = heat_maps(classified(small, small_mirrored, large), [1, 0], (48, 64), (20, 30), CONTRACT, PROTOCOL)
    np.testing.assert_allclose(heat[0], ((0.2 + 0.4) / 2 + 0.9) / 2, rtol=1e-6)  # float32 scores
    np.testing.assert_allclose(heat[0] + heat[1], 1, rtol=1e-6)


def test_what_the_central_crop_leaves_out_is_not_seen() -> None:
    protocol = build_protocol("center", CONTRACT)  # scale 32, crop 28
    crop = view_with(np.full((1, 1), 0.7), 32, (28, 28))
    crop = replace(crop, view=protocol.views[0])
    (heat,) = heat_maps(classified(crop), [1], (64, 128), (64, 128), CONTRACT, protocol)
    seen = ~np.isnan(heat)
    # The crop lies 2 pixels from above and 18 from the left of 32x64, half as large as the image.
    assert seen[4:60, 36:92].all()
    assert seen.sum() == 56 * 56
    np.testing.assert_allclose(heat[seen], 0.7, rtol=1e-6)  # float32 scores


def test_what_the_cap_cuts_off_is_not_seen() -> None:
    capped = view_with(np.full((2, 42), 0.7), 32, (32, 128))  # of 32x320 pixels the middle 128
    (heat,) = heat_maps(classified(capped), [1], (10, 100), (10, 100), CONTRACT, PROTOCOL)
    assert (~np.isnan(heat)).sum(axis=1).tolist() == [40] * 10
    assert (~np.isnan(heat[:, 30:70])).all()


def class_scores(session: FakeSession, pixels: np.ndarray) -> np.ndarray:
    """Classify every window, (rows, columns, classes)."""
    powers = np.exp(session.window_logits(pixels))
    return powers / powers.sum(axis=-1, keepdims=True)


def noise_image(height: int, width: int) -> np.ndarray:
    """Make coarse noise, of which every crop is something else."""
    small = np.random.default_rng(3).integers(0, 256, (height // 6 + 1, width // 6 + 1, 3), np.uint8)
    return small.repeat(6, axis=0).repeat(6, axis=1)[:height, :width]


@pytest.mark.parametrize(
    ("size", "shown", "cut"),
    [((40, 57), (32, 46), 0), ((71, 33), (69, 32), 0), ((20, 160), (32, 128), 64)],  # the last is 32x256 before the cap
)
def test_each_point_of_a_ten_crop_map_is_the_mean_of_the_crops_that_show_it(
    size: tuple[int, int], shown: tuple[int, int], cut: int
) -> None:
    session, image, protocol = FakeSession(), noise_image(*size), build_protocol("ten-crop", CONTRACT)
    (answer,) = classify_images(session, [image], protocol, keep_windows=True)
    height, width = shown
    map_size = (height, width + 2 * cut)  # one point a pixel of the resized image
    maps = heat_maps(answer, [2, 0], size, map_size, CONTRACT, protocol)
    whole = np.asarray(Image.fromarray(image).resize((map_size[1], map_size[0]), Image.Resampling.BILINEAR))
    kept = whole[:, cut : cut + width]
    total, count = np.zeros((2, *map_size)), np.zeros(map_size)
    for top, left in [
        (0, 0),
        (0, width - 28),
        (height - 28, 0),
        (height - 28, width - 28),
        ((height - 28) // 2, (width - 28) // 2),
    ]:
        crop = kept[top : top + 28, left : left + 28]
        place = (slice(top, top + 28), slice(cut + left, cut + left + 28))
        for pixels in (crop, crop[:, ::-1]):
            total[0][place] += class_scores(session, pixels)[0, 0, 2]
            total[1][place] += class_scores(session, pixels)[0, 0, 0]
            count[place] += 1
    expected = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    assert len(np.unique(expected[0][count > 0])) > 4
    assert np.isnan(expected).any() == (size != (40, 57))  # an elongated image has points that no crop shows
    np.testing.assert_allclose(maps, expected, rtol=1e-5)  # float32 scores


def test_a_map_of_spp_18_shows_all_windows_that_were_classified_and_not_only_the_nine() -> None:
    session, image = FakeSession(), noise_image(40, 57)
    nine, dense = (build_protocol(name, CONTRACT) for name in ("spp-18-28-41", "dense-28-41"))
    (of_nine,) = classify_images(session, [image], nine, keep_windows=True)
    maps = heat_maps(of_nine, [1, 4], (40, 57), (30, 50), CONTRACT, nine)
    scales = []
    for scale, columns in ((28, 40), (41, 58)):
        resized = np.asarray(Image.fromarray(image).resize((columns, scale), Image.Resampling.BILINEAR))
        pair = []
        for pixels, mirrored in ((resized, False), (resized[:, ::-1], True)):
            of_windows = class_scores(session, pixels)
            laid = np.empty((2, 30, 50))
            for row in range(30):
                for column in range(50):
                    y, x = (row + 0.5) * scale / 30 - 0.5, (column + 0.5) * columns / 50 - 0.5
                    x = columns - 1 - x if mirrored else x
                    laid[:, row, column] = between_windows(of_windows[:, :, [1, 4]], y, x)
            pair.append(laid)
        scales.append((pair[0] + pair[1]) / 2)
    np.testing.assert_allclose(maps, (scales[0] + scales[1]) / 2, rtol=1e-5)  # float32 scores
    (of_all,) = classify_images(session, [image], dense, keep_windows=True)
    np.testing.assert_array_equal(maps, heat_maps(of_all, [1, 4], (40, 57), (30, 50), CONTRACT, dense))


def between_windows(of_windows: np.ndarray, y: float, x: float) -> np.ndarray:
    """Interpolate between the windows around a pixel; their centers are 13.5, 17.5, … (see above)."""
    rows, columns = of_windows.shape[:2]
    y, x = np.clip((y - 13.5) / 4, 0, rows - 1), np.clip((x - 13.5) / 4, 0, columns - 1)
    total = np.zeros(of_windows.shape[2])
    for row in range(rows):
        for column in range(columns):
            total += max(0, 1 - abs(y - row)) * max(0, 1 - abs(x - column)) * of_windows[row, column]
    return total


def test_colors_rise_evenly_in_lightness() -> None:
    luma = apply_color_map(np.linspace(0, 1, 50)) @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(luma) > 0).all()
    assert apply_color_map(np.zeros((2, 3))).shape == (2, 3, 3)


@pytest.mark.parametrize("size", [(28, 31), (1, 1), (1, 20000), (700, 90), (3000, 4000)])
@pytest.mark.parametrize("name", ["multi-scale", "center", "ten-crop", "spp-18"])
def test_any_image_gets_one_sheet_of_six_readable_panels(size: tuple[int, int], name: str) -> None:
    image = np.random.default_rng(4).integers(0, 256, (*size, 3), np.uint8)
    protocol = build_protocol(name, CONTRACT)
    (answer,) = classify_images(FakeSession(), [image], protocol, keep_windows=True)
    drawn = draw_heat_maps(panel_picture(image), size, answer, CONTRACT, protocol)
    assert drawn.dtype == np.uint8
    assert 600 < drawn.shape[1] < 2400
    assert 100 < drawn.shape[0] < 1200


def test_the_sheet_shows_the_image_and_no_more_overlays_than_there_are_classes() -> None:
    contract = fake_contract(classes=2)
    image = np.full((40, 40, 3), (200, 30, 10), np.uint8)
    protocol = build_protocol("multi-scale", contract)
    (answer,) = classify_images(FakeSession(contract), [image], protocol, keep_windows=True)
    sheet = draw_heat_maps(panel_picture(image), (40, 40), answer, contract, protocol)
    with Image.open(io.BytesIO(png_bytes(sheet))) as drawn:
        pixels = np.asarray(drawn)
    assert (pixels == (200, 30, 10)).all(axis=-1).sum() == 320 * 320
    assert pixels.shape[1] == 3 * (320 + 12) + 12
