"""Protocols: the names users type, and the views they stand for."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import center_scale, default_scales
from prelunet.evaluator.engine.protocol_costs import paper_contract
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.protocols import (
    EvaluationProtocol,
    ProtocolOverrides,
    View,
    build_protocol,
    default_protocol_name,
    protocol_from_json,
    supported_protocols,
    title_of,
)
from tests.conftest import ExportedNet


def test_default_scales_are_the_papers_at_a_crop_of_224_and_in_proportion_elsewhere() -> None:
    assert default_scales(224) == (256, 384, 480)
    assert default_scales(28) == (32, 48, 60)
    assert default_scales(76) == (87, 130, 163)


def test_default_scales_lie_in_the_trained_range_as_in_the_paper() -> None:
    assert default_scales(224, trained=(256, 512)) == (256, 384, 480)
    assert default_scales(28, trained=(28, 36)) == (28, 32, 35)
    assert default_scales(28, trained=(32, 32)) == (32,)


def test_the_scale_of_center_is_in_proportion_to_the_crop_but_never_outside_the_trained_range() -> None:
    assert center_scale(224) == center_scale(224, trained=(256, 512)) == 256
    assert center_scale(20) == 23
    assert center_scale(20, trained=(20, 22)) == 22
    assert center_scale(224, trained=(384, 384)) == 384
    contract = replace(paper_contract(), center_scale=300)
    assert build_protocol("center", contract).scales == build_protocol("ten-crop", contract).scales == (300,)
    assert build_protocol("center-256", contract).scales == (256,)


def test_multi_scale_sees_each_scale_plain_and_mirrored(exported: dict[str, ExportedNet]) -> None:
    protocol = build_protocol("multi-scale", exported["demo-image"].session.contract)
    assert protocol.views == tuple(View(s, m) for s in (32, 48, 60) for m in (False, True))
    assert (protocol.averaging, protocol.weights) == ("softmax", "scale")


def test_center_sees_one_crop_that_is_not_mirrored() -> None:
    protocol = build_protocol("center", paper_contract())
    assert protocol.views == (View(256, False, "center"),)
    assert protocol.crop == 224


@pytest.mark.parametrize("name", ["dense-28", "dense-33", "dense-1024"])
def test_dense_s_sees_the_scale_it_names(exported: dict[str, ExportedNet], name: str) -> None:
    scale = int(name.removeprefix("dense-"))
    protocol = build_protocol(name, exported["demo-image"].session.contract)
    assert protocol.views == (View(scale, False), View(scale, True))


@pytest.mark.parametrize("name", ["dense-27", "dense-1025"])
def test_a_scale_outside_the_models_range_is_refused_with_the_range(
    exported: dict[str, ExportedNet], name: str
) -> None:
    with pytest.raises(UsageError, match=r"from 28 .* to 1024"):
        build_protocol(name, exported["demo-image"].session.contract)


@pytest.mark.parametrize(
    "name", ["", "dense", "dense-", "dense-0", "dense--5", "dense-1e3", "Center", "multiscale", "dense-٣٣"]
)
def test_an_unknown_protocol_is_refused_with_the_list(exported: dict[str, ExportedNet], name: str) -> None:
    with pytest.raises(UsageError, match=r"center, ten-crop, multi-scale"):
        build_protocol(name, exported["demo-image"].session.contract)


def test_ten_crop_sees_five_places_each_plain_and_mirrored_at_the_scale_of_center() -> None:
    protocol = build_protocol("ten-crop", paper_contract())
    places = ("top-left", "top-right", "bottom-left", "bottom-right", "center")
    assert protocol.views == tuple(View(256, mirrored, place) for place in places for mirrored in (False, True))
    assert (protocol.crop, protocol.averaging, protocol.weights) == (224, "softmax", "scale")


@pytest.mark.parametrize(
    ("name", "kind", "scales", "weights"),
    [
        ("spp-18", "spp-18", (224, 256, 300, 360, 448, 560), "view"),
        ("spp-net", "dense", (224, 256, 300, 360, 448, 560), "scale"),
        ("resnet", "dense", (224, 256, 384, 480, 640), "scale"),
        ("multi-scale", "dense", (256, 384, 480), "scale"),
        ("dense-300-257", "dense", (300, 257), "scale"),
        ("spp-18-256", "spp-18", (256,), "view"),
    ],
)
def test_the_scales_at_a_crop_of_224_are_those_of_the_papers(
    name: str, kind: str, scales: tuple[int, ...], weights: str
) -> None:
    protocol = build_protocol(name, paper_contract())
    part = "nine" if kind == "spp-18" else "whole"
    assert protocol.views == tuple(View(scale, mirrored, part) for scale in scales for mirrored in (False, True))
    assert (protocol.name, protocol.kind, protocol.weights, protocol.crop) == (name, kind, weights, None)


def test_the_scales_of_another_crop_are_in_proportion_and_halves_round_up(exported: dict[str, ExportedNet]) -> None:
    contract = exported["demo-image"].session.contract
    assert build_protocol("spp-net", contract).scales == (28, 32, 38, 45, 56, 70)
    assert build_protocol("resnet", contract).scales == (28, 32, 48, 60, 80)


def test_overrides_replace_a_protocols_values_and_other_scales_its_name() -> None:
    contract = paper_contract()
    overrides = ProtocolOverrides(scales=(300, 240), mirror=False, averaging="logit", weights="view", apply_exif=True)
    for name, changed in (("resnet", "dense-300-240"), ("spp-18", "spp-18-300-240"), ("ten-crop", "ten-crop-300-240")):
        protocol = build_protocol(name, contract, overrides)
        assert (protocol.name, protocol.scales, protocol.mirror) == (changed, (300, 240), False)
        assert (protocol.averaging, protocol.weights, protocol.apply_exif) == ("logit", "view", True)
        assert build_protocol(changed, contract, replace(overrides, scales=None)) == protocol
    assert build_protocol("center", contract, ProtocolOverrides(mirror=True)).views == (
        View(256, False, "center"),
        View(256, True, "center"),
    )


def test_the_title_of_a_protocol_says_what_differs_from_the_one_of_its_name() -> None:
    contract = paper_contract()
    for name in ("center", "ten-crop", "multi-scale", "spp-18"):
        assert title_of(build_protocol(name, contract)) == name

    def title(name: str, **changes: Any) -> str:
        return title_of(build_protocol(name, contract, ProtocolOverrides(**changes)))

    assert title("center", mirror=True) == "center, mirrored"
    assert title("dense-300", mirror=False, averaging="logit") == "dense-300, not mirrored, logits averaged"
    assert title("spp-18", weights="scale") == "spp-18, equal weight to each scale"
    changed = title("multi-scale", scales=(256, 300), weights="view", apply_exif=True)
    assert changed == "dense-256-300, equal weight to each view, EXIF orientation applied"


def test_scales_both_in_the_name_and_separately_are_refused() -> None:
    with pytest.raises(UsageError, match="dense-256 already names its scales"):
        build_protocol("dense-256", paper_contract(), ProtocolOverrides(scales=(384,)))


@pytest.mark.parametrize("name", ["center-223", "ten-crop-256-223", "center-3585", "ten-crop-99999"])
def test_a_scale_too_small_or_too_large_for_the_crop_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"crops of 224 pixels need scales from 224 to 3584"):
        build_protocol(name, paper_contract())


def test_the_smallest_and_the_largest_scale_of_a_crop_are_possible() -> None:
    assert build_protocol("ten-crop-224-3584", paper_contract()).scales == (224, 3584)


def test_too_many_scales_are_refused() -> None:
    many = [str(scale) for scale in range(224, 257)]
    assert len(build_protocol("dense-" + "-".join(many[:32]), paper_contract()).scales) == 32
    with pytest.raises(UsageError, match="a protocol with 33 scales: give at most 32"):
        build_protocol("dense-" + "-".join(many), paper_contract())


def test_a_net_of_fixed_size_supports_crops_and_refuses_the_rest_with_the_reason() -> None:
    fixed = replace(paper_contract(), max_side=224, default_scales=(224,))
    assert default_protocol_name(fixed) == "center"
    assert default_protocol_name(paper_contract()) == "multi-scale"
    for name in ("center", "ten-crop", "ten-crop-300"):
        assert build_protocol(name, fixed).crop == 224
    for name in ("multi-scale", "spp-18", "spp-net", "resnet", "dense-224"):
        with pytest.raises(UsageError, match=rf"{name}: this model takes only crops of 224x224.*center, ten-crop"):
            build_protocol(name, fixed)


def test_a_model_supports_the_protocols_that_can_be_built_for_it_its_default_first() -> None:
    paper = ("multi-scale", "center", "ten-crop", "spp-18", "spp-net", "resnet", "dense-256", "dense-384", "dense-480")
    assert supported_protocols(paper_contract()) == paper
    fixed = replace(paper_contract(), max_side=224, default_scales=(224,))
    assert supported_protocols(fixed) == ("center", "ten-crop")


def test_an_adopted_nets_resize_filter_becomes_part_of_its_protocols() -> None:
    contract = replace(paper_contract(), interpolation="bicubic")
    assert {build_protocol(name, contract).interpolation for name in ("center", "resnet")} == {"bicubic"}


EVERY_NAME = ["center", "ten-crop", "multi-scale", "spp-18", "spp-net", "resnet", "dense-240", "spp-18-224-300"]


@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_protocol_survives_json(name: str) -> None:
    overrides = ProtocolOverrides(mirror=name == "center", averaging="logit", weights="view", apply_exif=True)
    for protocol in (build_protocol(name, paper_contract()), build_protocol(name, paper_contract(), overrides)):
        assert protocol_from_json(json.loads(json.dumps(protocol.to_json()))) == protocol


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "sparse"}, "Invalid enum value 'sparse' - at `$.kind`"),
        ({"interpolation": "box"}, "Invalid enum value 'box' - at `$.interpolation`"),
        ({"averaging": "max"}, "Invalid enum value 'max' - at `$.averaging`"),
        ({"weights": 1}, "Expected `str`, got `int` - at `$.weights`"),
        ({"scales": [256, True]}, "Expected `int`, got `bool` - at `$.scales[1]`"),
        ({"scales": [256, 256]}, "scales must be different"),
        ({"mirror": 1}, "Expected `bool`, got `int` - at `$.mirror`"),
        ({"crop": None}, "kinds 'center' and 'ten-crop' need a crop"),
        ({"crop": 0}, "Expected `int` >= 1 - at `$.crop`"),
        ({"kind": "dense"}, "kinds 'center' and 'ten-crop' need a crop"),
        ({"long_side_cap": 0}, "Expected `int` >= 1 - at `$.long_side_cap`"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
    ids=str,
)
def test_invalid_protocol_data_is_refused_with_the_reason(change: dict[str, object], text: str) -> None:
    plain = {**build_protocol("ten-crop", paper_contract()).to_json(), **change}
    with pytest.raises(UsageError, match=re.escape(text)):
        protocol_from_json(plain)


def test_a_protocol_states_all_its_keys() -> None:
    plain = build_protocol("center", paper_contract()).to_json()
    del plain["averaging"]  # although it has a default
    with pytest.raises(UsageError, match="not a protocol: no key 'averaging'"):
        protocol_from_json(plain)


@pytest.mark.parametrize("scales", ["256,", "256;384", "0", "-256", "256, 384", "1e3", "", "٣٣", "100000"])
def test_an_invalid_scales_option_is_refused(scales: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--model", "m.onnx", "--data", "d", f"--scales={scales}"]) == 2
    assert "e.g. --scales 256,384" in capsys.readouterr().err


@pytest.mark.parametrize("scales", [(), (0,), (32, 32)])
def test_a_wrong_protocol_cannot_exist(scales: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"scales"):
        EvaluationProtocol("own", "dense", scales, mirror=True)
