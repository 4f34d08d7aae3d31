"""Protocols: the names users type, and the views they stand for."""

import pytest

from conftest import Exported
from evaluator.contract import default_scales
from evaluator.errors import UsageError
from evaluator.protocols import Protocol, View, make_protocol, protocol_from_json


def test_default_scales_are_the_papers_at_a_crop_of_224_and_in_proportion_elsewhere() -> None:
    assert default_scales(224) == (256, 384, 480)
    assert default_scales(28) == (32, 48, 60)
    assert default_scales(76) == (87, 130, 163)


def test_default_scales_lie_in_the_trained_range_as_the_papers_do_in_theirs() -> None:
    assert default_scales(224, trained=(256, 512)) == (256, 384, 480)
    assert default_scales(28, trained=(28, 36)) == (28, 32, 35)
    assert default_scales(28, trained=(32, 32)) == (32,)


def test_multi_scale_sees_each_scale_plain_and_mirrored(exported: dict[str, Exported]) -> None:
    protocol = make_protocol("multi-scale", exported["demo-image"].session.contract)
    assert protocol.views == tuple(View(s, m) for s in (32, 48, 60) for m in (False, True))
    assert (protocol.averaging, protocol.weights) == ("softmax", "scale")


def test_center_sees_one_crop_that_is_not_mirrored(exported: dict[str, Exported]) -> None:
    protocol = make_protocol("center", exported["E-image"].session.contract)
    assert protocol.views == (View(256, False, "center"),)
    assert protocol.crop == 224


@pytest.mark.parametrize("name", ["dense-28", "dense-33", "dense-1024"])
def test_dense_s_sees_the_scale_it_names(exported: dict[str, Exported], name: str) -> None:
    scale = int(name.removeprefix("dense-"))
    protocol = make_protocol(name, exported["demo-image"].session.contract)
    assert protocol.views == (View(scale, False), View(scale, True))


@pytest.mark.parametrize("name", ["dense-27", "dense-1025"])
def test_a_scale_outside_the_models_range_is_refused_with_the_range(exported: dict[str, Exported], name: str) -> None:
    with pytest.raises(UsageError, match=r"from 28 .* to 1024"):
        make_protocol(name, exported["demo-image"].session.contract)


@pytest.mark.parametrize(
    "name", ["", "dense", "dense-", "dense-0", "dense--5", "dense-1e3", "Center", "multiscale", "dense-٣٣"]
)
def test_an_unknown_protocol_is_refused_with_the_list(exported: dict[str, Exported], name: str) -> None:
    with pytest.raises(UsageError, match=r"center, ten-crop, multi-scale"):
        make_protocol(name, exported["demo-image"].session.contract)


def test_a_protocol_survives_json(exported: dict[str, Exported]) -> None:
    contract = exported["demo-image"].session.contract
    for name in ("center", "multi-scale", "dense-40"):
        protocol = make_protocol(name, contract)
        assert protocol_from_json(protocol.to_json()) == protocol


@pytest.mark.parametrize("scales", [(), (0,), (32, 32)])
def test_a_wrong_protocol_cannot_exist(scales: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"scales"):
        Protocol("own", "dense", scales, mirror=True)
