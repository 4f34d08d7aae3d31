"""The torch net and its dense evaluation, compared with loops that follow the definitions literally."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import prelunet.training.net.dense_reference
from prelunet.evaluator.architectures import (
    ACTIVATIONS,
    ARCHITECTURES,
    Activation,
    Pool,
    architecture,
    parameter_shapes,
)
from prelunet.evaluator.contract import golden_image
from prelunet.training.net.checkpoints import Checkpoint
from prelunet.training.net.dense_reference import dense_windows, subtract_mean
from prelunet.training.net.network import PreluNet, load_tensors, network_from_checkpoint, parameter_groups, tensors_of
from tests.helpers.tiny_nets import CLASSES, TINY, mean_image, tiny_checkpoint

ROUNDING = {"rtol": 0, "atol": 1e-12}  # both in float64: only the order of sums of order 1 to 100 differs


def float64_net(checkpoint: Checkpoint) -> PreluNet:
    return network_from_checkpoint(checkpoint).double()


def plain_activation(value: float, channel: int, activation: Activation, slope: np.ndarray | None) -> float:
    if activation == "relu":
        return max(0.0, value)
    a = 0.01 if slope is None else float(slope[channel] if activation == "prelu" else slope[0])
    return value if value > 0 else a * value


def plain_trunk(checkpoint: Checkpoint, image: np.ndarray) -> np.ndarray:
    """Return the feature map (C, rows, columns) of an image (3, height, width), cell by cell."""
    maps, tensors = image, checkpoint.tensors
    for layer, size in zip(checkpoint.architecture.trunk, checkpoint.architecture.layers, strict=True):
        padded = np.pad(maps, ((0, 0), (size.pad, size.pad), (size.pad, size.pad)))
        rows, columns = (size.output_side(side) for side in maps.shape[1:])
        channels = maps.shape[0] if isinstance(layer, Pool) else layer.channels
        result = np.empty((channels, rows, columns))
        for channel, row, column in np.ndindex(result.shape):
            top, left = row * size.stride, column * size.stride
            patch = padded[:, top : top + size.kernel, left : left + size.kernel]
            if isinstance(layer, Pool):
                result[channel, row, column] = patch[channel].max()
            else:
                weight, bias = tensors[f"{layer.name}.weight"], tensors[f"{layer.name}.bias"]
                value = float((patch * weight[channel]).sum() + bias[channel])
                slope = tensors.get(f"{layer.name}.slope")
                value = plain_activation(value, channel, checkpoint.architecture.activation, slope)
                result[channel, row, column] = value
        maps = result
    return maps


def plain_pyramid(window: np.ndarray, levels: tuple[int, ...]) -> np.ndarray:
    """Return the features of one window (C, w, w): for each level, channel by channel, row by row."""
    side, features = window.shape[1], []
    for level in levels:
        edges = [(i * side // level, -(-(i + 1) * side // level)) for i in range(level)]
        for channel in window:
            for top, bottom in edges:
                for left, right in edges:
                    features.append(max(channel[y, x] for y in range(top, bottom) for x in range(left, right)))
    return np.array(features)


def plain_head(checkpoint: Checkpoint, features: np.ndarray) -> np.ndarray:
    """Return the logits (K,) of features, one neuron at a time."""
    values, tensors = features, checkpoint.tensors
    for name in ("fc1", "fc2", "fc3"):
        sums = [
            float((row * values).sum() + bias)
            for row, bias in zip(tensors[f"{name}.weight"].astype(float), tensors[f"{name}.bias"], strict=True)
        ]
        if name != "fc3":
            activation, slope = checkpoint.architecture.activation, tensors.get(f"{name}.slope")
            sums = [plain_activation(value, index, activation, slope) for index, value in enumerate(sums)]
        values = np.array(sums)
    return values


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_parameters_have_the_names_and_shapes_of_a_checkpoint(name: str, activation: Activation) -> None:
    net = architecture(name, activation=activation)
    with torch.device("meta"):
        state = PreluNet(net, 7).state_dict()
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    assert list(shapes.items()) == list(parameter_shapes(net, 7).items())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_trunk_equals_a_plain_convolution_of_an_oblong_image(activation: Activation) -> None:
    checkpoint = tiny_checkpoint(activation)
    image = np.random.default_rng(0).uniform(-1, 1, (3, 13, 22))
    actual = float64_net(checkpoint).trunk(torch.from_numpy(image)[None])[0]
    expected = plain_trunk(checkpoint, image)
    assert (expected < 0).any() == (activation != "relu"), "slopes need negative values"
    np.testing.assert_allclose(actual.detach(), expected, **ROUNDING)


def test_a_slope_belongs_to_its_channel_not_to_a_row_or_column() -> None:
    checkpoint = tiny_checkpoint()
    image = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (1, 3, 13, 13)))
    net = float64_net(checkpoint)
    before = net.trunk(image).detach()
    net.get_parameter("conv2.slope").data[2] += 0.5
    changed = (net.trunk(image).detach() != before).any(dim=(0, 2, 3))
    assert changed.tolist() == [False, False, True, False]


def test_three_bins_over_14_cells_are_0_to_5_4_to_10_9_to_14() -> None:
    net = PreluNet(replace(TINY, spp_levels=(3,)), CLASSES)
    rows = torch.arange(14.0)[:, None].expand(1, 1, 14, 14)
    assert net.pyramid(rows).reshape(3, 3)[:, 0].tolist() == [4, 9, 13]  # the largest row of a bin is its last
    assert net.pyramid(-rows).reshape(3, 3)[:, 0].tolist() == [0, -4, -9]  # and the first for negative cells


def test_features_are_ordered_by_level_channel_row_column() -> None:
    window = np.random.default_rng(1).uniform(-2, -1, (4, 7, 7))  # all negative: maxima that start at 0 would show
    features = float64_net(tiny_checkpoint()).pyramid(torch.from_numpy(window)[None])[0]
    np.testing.assert_array_equal(features, plain_pyramid(window, (3, 1, 2)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_bin_is_that_of_torchs_pooling_to_the_bit_also_with_ties(
    kind: torch.dtype, layout: torch.memory_format
) -> None:
    levels = (7, 3, 2, 1)  # those of the paper: bins of 3 over 14 overlap
    net, random = PreluNet(replace(TINY, spp_levels=levels), CLASSES), torch.Generator().manual_seed(0)
    values = torch.randint(-4, 0, (2, 5, 14, 14), generator=random)  # nearly every bin has several maxima
    weights = torch.randn(2, 5 * sum(level * level for level in levels), generator=random).to(kind)
    windows = [values.to(kind, memory_format=layout).requires_grad_() for _ in range(2)]
    torch.autograd.backward(net.pyramid(windows[0]), weights)
    pooled = torch.cat([nn.functional.adaptive_max_pool2d(windows[1], level).flatten(1) for level in levels], dim=1)
    torch.autograd.backward(pooled, weights)
    gradient, of_torch = (window.grad for window in windows)
    assert gradient is not None
    assert of_torch is not None
    assert torch.equal(gradient, of_torch)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_head_equals_plain_sums(activation: Activation) -> None:
    checkpoint = tiny_checkpoint(activation)
    features = np.random.default_rng(2).uniform(-1, 1, 14 * 4)
    logits = float64_net(checkpoint).head(torch.from_numpy(features)[None])[0]
    np.testing.assert_allclose(logits.detach(), plain_head(checkpoint, features), **ROUNDING)


def test_dropout_factors_multiply_the_activations_of_fc1_and_fc2() -> None:
    checkpoint = tiny_checkpoint()
    net, random = float64_net(checkpoint), np.random.default_rng(5)
    features = torch.from_numpy(random.uniform(-1, 1, (2, 56)))
    factors = tuple(torch.from_numpy(random.choice([0.0, 2.0], (2, 6))) for _ in range(2))
    expected = features
    for name, factor in zip(("fc1", "fc2"), factors, strict=True):
        weight, bias, slope = (net.get_parameter(f"{name}.{kind}") for kind in ("weight", "bias", "slope"))
        expected = nn.functional.prelu(expected @ weight.T + bias, slope) * factor
    expected = expected @ net.get_parameter("fc3.weight").T + net.get_parameter("fc3.bias")
    torch.testing.assert_close(net.head(features, (factors[0], factors[1])), expected, **ROUNDING)
    assert not torch.allclose(net.head(features), expected, rtol=0.1)


def test_the_hook_receives_every_response_before_its_activation() -> None:
    checkpoint = tiny_checkpoint()
    net, seen = float64_net(checkpoint), dict[str, torch.Tensor]()
    images = torch.from_numpy(np.random.default_rng(3).uniform(-1, 1, (2, 3, 24, 24)))
    net.response_hook = lambda name, response: seen.update({name: response})
    logits = net(images)
    convs = [conv.name for conv in checkpoint.architecture.convs]
    assert list(seen) == [*convs, "fc1", "fc2", "fc3"]
    assert seen["fc3"] is logits
    first = checkpoint.architecture.convs[0]
    weight, bias = net.get_parameter(f"{first.name}.weight"), net.get_parameter(f"{first.name}.bias")
    expected = nn.functional.conv2d(images, weight, bias, stride=first.stride, padding=first.pad)
    torch.testing.assert_close(seen[first.name], expected, **ROUNDING)
    assert (seen[first.name] < 0).any()


def test_a_net_without_its_head_still_gives_features() -> None:
    checkpoint = tiny_checkpoint()
    net, whole = float64_net(checkpoint), float64_net(checkpoint)
    net.drop_head()
    assert (hasattr(net, "fc1"), hasattr(whole, "fc1")) == (False, True)
    assert {name.split(".")[0] for name, _ in net.named_parameters()} == {c.name for c in checkpoint.architecture.convs}
    images = torch.from_numpy(np.random.default_rng(3).uniform(-1, 1, (2, 3, 24, 24)))
    torch.testing.assert_close(whole.head(net.features(images)), whole(images), **ROUNDING)


def test_a_crop_gives_the_logits_of_its_one_window() -> None:
    checkpoint = tiny_checkpoint()
    images = np.random.default_rng(3).uniform(-1, 1, (2, 3, 24, 24))
    logits = float64_net(checkpoint)(torch.from_numpy(images))
    for image, actual in zip(images, logits.detach(), strict=True):
        features = plain_pyramid(plain_trunk(checkpoint, image), checkpoint.architecture.spp_levels)
        np.testing.assert_allclose(actual, plain_head(checkpoint, features), **ROUNDING)


def test_images_larger_than_a_crop_fail_an_assertion() -> None:
    with pytest.raises(AssertionError, match="not one crop"):
        PreluNet(TINY, CLASSES)(torch.zeros(1, 3, 28, 24))


@pytest.mark.parametrize("activation", ["prelu", "prelu-shared"])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {"weight": 0.9, "bias": 0.9, "slope": 1.0}),
        ({"decay_biases": False, "bias_rate": 2.0}, {"weight": 0.9, "bias": 1.0, "slope": 1.0}),
        ({"decay_slopes": True, "bias_rate": 3.0}, {"weight": 0.9, "bias": 0.7, "slope": 0.9}),
    ],
)
def test_weight_decay_shrinks_only_the_parameters_that_it_applies_to(
    activation: Activation, options: dict[str, Any], kept: dict[str, float]
) -> None:
    net = network_from_checkpoint(tiny_checkpoint(activation))
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    groups = parameter_groups(net, weight_decay=0.1, **options)
    for group in groups:
        group["lr"] = group["rate_factor"]
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(groups, lr=1.0).step()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * kept[name.rpartition(".")[2]])
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in net.parameters())


def test_a_net_without_slopes_has_one_group_of_parameters() -> None:
    (group,) = parameter_groups(PreluNet(replace(TINY, activation="relu"), CLASSES), weight_decay=5e-4)
    assert group["weight_decay"] == 5e-4


def test_slopes_learn() -> None:
    net = network_from_checkpoint(tiny_checkpoint())
    net(torch.randn(4, 3, 24, 24)).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_tensors_pass_through_a_net_unchanged() -> None:
    checkpoint = tiny_checkpoint()
    net = PreluNet(checkpoint.architecture, CLASSES)
    load_tensors(net, checkpoint.tensors)
    for tensors in (tensors_of(net), tensors_of(network_from_checkpoint(checkpoint))):
        assert list(tensors) == list(checkpoint.tensors)
        for name, tensor in tensors.items():
            assert tensor.dtype == np.float32
            np.testing.assert_array_equal(tensor, checkpoint.tensors[name])


def test_loading_a_net_copies_no_weight() -> None:
    checkpoint = tiny_checkpoint()
    for name, parameter in network_from_checkpoint(checkpoint).named_parameters():
        assert parameter.data_ptr() == checkpoint.tensors[name].ctypes.data, name


def test_training_a_loaded_net_does_not_change_the_checkpoint() -> None:
    checkpoint = tiny_checkpoint()
    net = PreluNet(checkpoint.architecture, CLASSES)
    load_tensors(net, checkpoint.tensors)
    net.get_parameter("fc3.bias").data += 1
    np.testing.assert_array_equal(checkpoint.tensors["fc3.bias"], tiny_checkpoint().tensors["fc3.bias"])


@pytest.mark.parametrize("size", [(24, 24), (29, 41), (52, 24)])
def test_dense_scores_equal_each_window_cut_out_and_classified_alone(size: tuple[int, int]) -> None:
    checkpoint = tiny_checkpoint()
    image = golden_image(*size)
    scores, logits = dense_windows(float64_net(checkpoint), image, checkpoint.mean)
    feature_map = plain_trunk(checkpoint, image.transpose(2, 0, 1) - checkpoint.mean.astype(float)[:, None, None])
    assert scores.shape == logits.shape == (feature_map.shape[1] - 6, feature_map.shape[2] - 6, CLASSES)
    for row, column in np.ndindex(scores.shape[:2]):
        window = feature_map[:, row : row + 7, column : column + 7]
        expected = plain_head(checkpoint, plain_pyramid(window, checkpoint.architecture.spp_levels))
        np.testing.assert_allclose(logits[row, column], expected, rtol=1e-12, atol=1e-10)  # pixels: sums of thousands
        exponentials = np.exp(expected - expected.max())
        np.testing.assert_allclose(scores[row, column], exponentials / exponentials.sum(), rtol=0, atol=1e-10)


def test_dense_evaluation_does_not_depend_on_the_batches_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_checkpoint()
    net, image = float64_net(checkpoint), golden_image(45, 60)
    whole = dense_windows(net, image, checkpoint.mean)
    monkeypatch.setattr(prelunet.training.net.dense_reference, "WINDOWS_PER_BATCH", 7)
    pieces = dense_windows(net, image, checkpoint.mean)
    assert whole[0].shape[0] * whole[0].shape[1] % 7, "the last piece should be a smaller one"
    np.testing.assert_allclose(pieces[1], whole[1], rtol=1e-12)  # matrix products of other sizes add up otherwise
    np.testing.assert_allclose(pieces[0], whole[0], rtol=0, atol=1e-12)


def test_dense_evaluation_keeps_the_precision_of_the_net() -> None:
    checkpoint = tiny_checkpoint()
    for net, dtype in ((network_from_checkpoint(checkpoint), np.float32), (float64_net(checkpoint), np.float64)):
        scores, logits = dense_windows(net, golden_image(24, 30), checkpoint.mean)
        assert scores.dtype == logits.dtype == dtype


def test_a_mirrored_view_and_a_read_only_image_can_be_evaluated() -> None:
    net, image = float64_net(tiny_checkpoint()), golden_image(27, 34)
    mirrored = image[:, ::-1]
    mirrored.flags.writeable = False
    expected = dense_windows(net, np.ascontiguousarray(mirrored), np.zeros(3, np.float32))[1]
    np.testing.assert_array_equal(dense_windows(net, mirrored, np.zeros(3, np.float32))[1], expected)
    assert (expected != dense_windows(net, image, np.zeros(3, np.float32))[1]).all()


def test_a_net_in_training_mode_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match=r"eval\(\)"):
        dense_windows(PreluNet(TINY, CLASSES), golden_image(24, 24), np.zeros(3, np.float32))


def test_the_channel_mean_is_subtracted_from_its_own_channel() -> None:
    images = np.stack([golden_image(4, 6), golden_image(4, 6)[::-1]])
    result = subtract_mean(torch.from_numpy(images), np.array([10, 20, 40], np.float64))
    assert result.dtype == torch.float64
    for n, row, column, channel in np.ndindex(images.shape):
        assert result[n, channel, row, column] == float(images[n, row, column, channel]) - (10, 20, 40)[channel]


def test_a_mean_image_of_the_same_size_is_subtracted_pixel_by_pixel() -> None:
    images, mean = golden_image(24, 24)[None], mean_image()
    result = subtract_mean(torch.from_numpy(images.copy()), mean)
    np.testing.assert_array_equal(result.numpy().transpose(0, 2, 3, 1), images.astype(np.float32) - mean)


@pytest.mark.parametrize("size", [(31, 57), (24, 49)])
def test_a_mean_image_is_warped_with_half_pixel_centers(size: tuple[int, int]) -> None:
    mean = mean_image().astype(np.float64)
    black = torch.zeros(1, *size, 3, dtype=torch.uint8)
    warped = -subtract_mean(black, mean)[0].numpy().transpose(1, 2, 0)
    for row, column in np.ndindex(size):
        y, x = (
            min(max((place + 0.5) * 24 / side - 0.5, 0), 23) for place, side in zip((row, column), size, strict=True)
        )
        top, left = int(y), int(x)
        bottom, right = min(top + 1, 23), min(left + 1, 23)
        upper = mean[top, left] * (1 - x + left) + mean[top, right] * (x - left)
        lower = mean[bottom, left] * (1 - x + left) + mean[bottom, right] * (x - left)
        # torch may compute the places in float32 steps: 1e-5 of a pixel times slopes up to 130 levels
        np.testing.assert_allclose(warped[row, column], upper * (1 - y + top) + lower * (y - top), rtol=0, atol=1e-3)
