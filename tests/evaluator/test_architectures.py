"""The nets of the paper as data, against the paper's own numbers."""

import json
import re
from typing import Any

import pytest
from msgspec.structs import replace

from prelunet.evaluator.architectures import (
    ARCHITECTURES,
    Activation,
    Architecture,
    OpaqueNet,
    architecture,
    architecture_from_json,
    multiply_adds,
    net_from_json,
    parameter_shapes,
)
from prelunet.evaluator.errors import UsageError
from tests.helpers.tiny_nets import TINY


def count(net: Architecture, kind: str = "", classes: int = 1000) -> int:
    """Count the parameters whose name ends with `kind`, with plain loops."""
    total = 0
    for name, shape in parameter_shapes(net, classes).items():
        if name.endswith(kind):
            product = 1
            for side in shape:
                product *= side
            total += product
    return total


@pytest.mark.parametrize(("name", "millions"), [("A", 178.03), ("B", 183.34), ("C", 330.62)])
def test_parameters_of_the_large_models_are_those_of_the_paper(name: str, millions: float) -> None:
    assert round(count(architecture(name)) / 1e6, 2) == millions


@pytest.mark.parametrize(("name", "tens_of_billions"), [("A", 1.906), ("B", 2.322), ("C", 5.346)])
def test_multiply_adds_of_one_crop_are_the_complexity_of_table_3(name: str, tens_of_billions: float) -> None:
    assert round(multiply_adds(architecture(name), 224, 224, 1000) / 1e10, 3) == tens_of_billions


@pytest.mark.parametrize(("name", "slopes"), [("A", 14_688), ("B", 15_968), ("C", 20_576)])
def test_each_channel_of_the_large_models_has_a_slope(name: str, slopes: int) -> None:
    assert count(architecture(name), ".slope") == slopes


@pytest.mark.parametrize(("name", "layers", "channels"), [("A", 19, 512), ("B", 22, 512), ("C", 22, 896)])
def test_weighted_layers_and_last_channels_are_those_of_table_3(name: str, layers: int, channels: int) -> None:
    net = architecture(name)
    assert (len(net.convs) + 3, net.channels) == (layers, channels)
    assert parameter_shapes(net, 1000)["fc1.weight"] == (4096, 63 * channels)


def sizes_and_widths(net: Architecture) -> list[tuple[int, int, int]]:
    """Return kernel, stride and channels of each layer of the trunk; 0 channels for a pool."""
    return [(layer.kernel, layer.stride, getattr(layer, "channels", 0)) for layer in net.trunk]


@pytest.mark.parametrize(
    ("name", "convs", "widths"), [("A", 5, (256, 512, 512)), ("B", 6, (256, 512, 512)), ("C", 6, (384, 768, 896))]
)
def test_the_large_trunks_are_those_of_table_3(name: str, convs: int, widths: tuple[int, int, int]) -> None:
    pool = (2, 2, 0)
    stages = [[(3, 1, width)] * convs for width in widths]
    expected = [(7, 2, 96), pool, *stages[0], pool, *stages[1], pool, *stages[2]]
    assert sizes_and_widths(architecture(name)) == expected


def test_the_trunk_of_model_e_is_that_of_table_1() -> None:
    expected = [(7, 2, 64), (3, 3, 0), *[(2, 1, 128)] * 4, (2, 2, 0), *[(2, 1, 256)] * 6]
    assert sizes_and_widths(architecture("E")) == expected
    assert architecture("E").spp_levels == (6, 3, 2, 1)
    assert parameter_shapes(architecture("E"), 1000)["fc1.weight"] == (4096, 12_800)


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_a_large_model_sees_224_pixels_as_one_window_of_14_at_stride_16(name: str) -> None:
    net = architecture(name)
    assert (net.window, net.trunk_stride, net.bins) == (14, 16, 63)


def test_multiply_adds_of_a_larger_image_count_every_window() -> None:
    # by hand: conv1 3·3·3·5 at 14x20; pool 7x10; conv2 2·2·5·4 at 8x11; 2x5 windows of 14·4 features
    assert TINY.bins == 14
    expected = 135 * 14 * 20 + 80 * 8 * 11 + 2 * 5 * (56 * 6 + 6 * 6 + 6 * 3)
    assert multiply_adds(TINY, 28, 40, 3) == expected


def test_shared_slopes_add_13_parameters_to_model_e() -> None:
    shared, relu = architecture("E", activation="prelu-shared"), architecture("E", activation="relu")
    assert count(shared) - count(relu) == 13
    assert parameter_shapes(shared, 1000)["conv2_3.slope"] == (1,)


def test_maps_of_model_e_stay_dominantly_36_and_18_wide() -> None:
    net = architecture("E")
    side, sides = net.crop, []
    for layer in net.layers:
        side = layer.output_side(side)
        sides.append(side)
    assert sides == [112, 37, 36, 37, 36, 37, 18, 17, 18, 17, 18, 17, 18]
    assert (net.window, net.trunk_stride, len(net.convs)) == (18, 12, 11)


def test_the_30_layer_form_of_model_e_has_27_convolutions() -> None:
    net = architecture("E30")
    assert [conv.name for conv in net.convs][-17:] == [f"conv3_{index}" for index in range(6, 23)]
    assert (len(net.convs), net.window) == (27, 18)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("activation", ["prelu", "lrelu"])
def test_an_architecture_survives_json(name: str, activation: Activation) -> None:
    net = architecture(name, activation=activation)
    assert architecture_from_json(json.loads(json.dumps(net.to_json()))) == net


def test_a_crop_too_small_for_the_pyramid_is_refused_with_the_sizes() -> None:
    assert architecture("demo", crop=12).window == 3
    with pytest.raises(UsageError, match=r"crop of 11 px gives a 2x2 feature map, too small for 3x3 bins"):
        architecture("demo", crop=11)


def test_an_unknown_architecture_is_refused_with_the_list_of_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown architecture 'D'\. Valid architectures: A, B, C, E, E30, demo"):
        architecture("D")


def test_an_unknown_activation_is_refused_with_the_list_of_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown activation 'elu'\. Valid .*: prelu, prelu-shared, relu, lrelu"):
        replace(TINY, activation="elu")  # type: ignore[arg-type]


@pytest.mark.parametrize("crop", [0, -28, 4097, 10**7, 10**27, 28.5, 28.0, True, "28", None, float("nan")])
def test_an_invalid_crop_is_refused_by_name_and_from_json(crop: Any) -> None:
    with pytest.raises(ValueError, match=r"the crop should be from 1 to 4096 px, not|`\$\.crop`"):
        architecture_from_json({**TINY.to_json(), "crop": crop})
    if type(crop) is int:
        with pytest.raises(UsageError, match=r"the crop should be from 1 to 4096 px, not"):
            architecture("demo", crop=crop)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"name": [1]}, "name"),
        ({"hidden": "256"}, "hidden"),
        ({"hidden": 0}, "hidden"),
        ({"hidden2": 65_537}, "hidden2"),
        ({"activation": [["prelu"]]}, "activation"),
        ({"spp_levels": [3, True]}, "spp_levels[1]"),
        ({"spp_levels": [3, 0]}, "spp_levels[1]"),
        ({"spp_levels": []}, "spp_levels"),
        ({"trunk": "conv1"}, "trunk"),
        ({"trunk": [["conv1"]]}, "trunk[0]"),
        *(
            ({"trunk": [{**TINY.to_json()["trunk"][0], key: value}]}, f"trunk[0].{key}")
            for key, value in (
                ("name", 1),
                ("kernel", "3"),
                ("kernel", 0),
                ("stride", 0),
                ("pad", -1),
                ("pad", 10**9),
                ("channels", True),
            )
        ),
    ],
)
def test_an_architecture_with_values_of_another_type_or_out_of_range_is_refused(
    change: dict[str, Any], place: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"at `$.{place}`")):
        architecture_from_json({**TINY.to_json(), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trunk": []}, "has no convolution"),
        ({"trunk": [{"kind": "conv", "name": "conv1", "kernel": 3}]}, "channels"),
        ({"trunk": [{"kind": "conv", "name": "conv1", "kernel": 3, "channels": 5, "groups": 2}]}, "groups"),
        ({"trunk": [{"kind": "pool", "name": "pool1", "kernel": 2, "stride": 2}]}, "has no convolution"),
        ({"width": 3}, "width"),
        ({"activation": "elu"}, "Invalid enum value 'elu' - at `$.activation`"),
        ({"crop": 3}, "too small for"),
    ],
)
def test_data_of_no_possible_architecture_is_a_value_error_that_names_the_fault(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        architecture_from_json({**TINY.to_json(), **change})


@pytest.mark.parametrize("net", [TINY, OpaqueNet("resnet50", "relu", 4_089_184_256), OpaqueNet("x", "unknown")])
def test_a_net_with_or_without_layers_is_read_from_its_json(net: Architecture | OpaqueNet) -> None:
    assert net_from_json(json.loads(json.dumps(net.to_json()))) == net


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "missing required field `name`"),
        ({"name": "a", "activation": 1}, "at `$.activation`"),
        ({"name": "a", "activation": "relu", "multiply_adds": 0}, "Expected `int` >= 1 - at `$.multiply_adds`"),
        ({"name": "a", "activation": "relu", "trunk": None}, "Expected `array`, got `null` - at `$.trunk`"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_data_of_no_net_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        net_from_json(data)
