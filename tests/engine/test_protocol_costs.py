"""Costs of protocols, against the paper's numbers and plain loops; and `prelunet protocols`, which prints them."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from prelunet.evaluator.architectures import OpaqueNet, architecture, multiply_adds
from prelunet.evaluator.cli import run
from prelunet.evaluator.engine.protocol_costs import ProtocolCost, paper_contract, protocol_costs
from prelunet.evaluator.protocols import PROTOCOL_NAMES
from prelunet.evaluator.verbs.protocols import in_units, table
from tests.conftest import ExportedNet
from tests.engine.contracts import build_contract

ROOT = Path(__file__).parents[2]
IMAGENET = (375, 500)  # 3:4, so that 480 becomes 480x640


def by_name(costs: list[ProtocolCost]) -> dict[str, ProtocolCost]:
    return {cost.name: cost for cost in costs}


# The expected numbers assume that the trunk's cost is proportional to pixels; pools that round down save up to 0.25 %.
ROUNDING = 2.5e-3


@pytest.mark.parametrize(("name", "giga"), [("A", 657), ("B", 755), ("C", 1603)])
def test_multi_scale_of_a_large_model_costs_30_to_34_crops(name: str, giga: int) -> None:
    costs = by_name(protocol_costs(build_contract(name), *IMAGENET))
    total, crop = costs["multi-scale"].multiply_adds, costs["center"].multiply_adds
    assert total == pytest.approx(giga * 1e9, rel=ROUNDING)
    assert total < (giga + 0.5) * 1e9
    assert crop == multiply_adds(architecture(name), 224, 224, 1000)
    assert costs["multi-scale"].times_center == pytest.approx(total / crop, abs=0.005)
    assert 29.9 < costs["multi-scale"].times_center < 34.6
    assert costs["center"].times_center == 1


def test_the_resnet_scales_of_model_c_cost_3450_giga() -> None:
    cost = by_name(protocol_costs(build_contract("C"), *IMAGENET))["resnet"]
    assert cost.multiply_adds == pytest.approx(3450e9, rel=ROUNDING)


def test_views_and_windows_are_those_of_the_papers() -> None:
    costs = by_name(protocol_costs(paper_contract(), *IMAGENET))
    assert {name: (cost.views, cost.windows) for name, cost in costs.items()} == {
        "center": (1, 1),
        "ten-crop": (10, 10),
        "dense-256": (2, 2 * 24),
        "dense-384": (2, 2 * 209),
        "dense-480": (2, 2 * 459),
        "multi-scale": (6, 2 * (24 + 209 + 459)),
        "spp-18": (12, 96),
        "spp-net": (12, 2 * (5 + 24 + 5 * 12 + 9 * 17 + 15 * 24 + 22 * 33)),
        "resnet": (10, 2 * (5 + 24 + 209 + 459 + 1080)),
    }
    assert {cost.multiply_adds for cost in costs.values()} == {None}


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_the_papers_sizes_are_those_of_models_a_b_and_c(name: str) -> None:
    for size in [(224, 224), (301, 451), (256, 341), (640, 853)]:
        assert paper_contract().window_grid(*size) == build_contract(name).window_grid(*size)
    assert paper_contract().default_scales == (256, 384, 480)


def test_an_elongated_image_is_counted_as_it_is_cut() -> None:
    costs = by_name(protocol_costs(build_contract("A"), 100, 900))
    assert costs["dense-256"].windows == 2 * 3 * (64 - 13)  # 256x1024 of 256x2304
    assert costs["dense-256"].multiply_adds == 2 * multiply_adds(architecture("A"), 256, 1024, 1000)


@pytest.mark.parametrize(("stated", "ten"), [(4_089_184_256, 40_891_842_560), (None, None)])
def test_an_adopted_net_states_its_own_cost_or_none(stated: int | None, ten: int | None) -> None:
    net = OpaqueNet("resnet50", "relu", stated)
    adopted = replace(paper_contract(), architecture=net, max_side=224, default_scales=(224,))
    costs = by_name(protocol_costs(adopted, *IMAGENET))
    assert costs["ten-crop"].multiply_adds == ten
    assert costs["ten-crop"].times_center == (10 if ten else None)
    assert costs["ten-crop"].refusal is None
    for name in ("multi-scale", "spp-18", "spp-net", "resnet", "dense-224"):
        assert "this model takes only crops of 224x224" in costs[name].refusal
        assert costs[name].views is None
    lines = table(list(costs.values()), with_cost=True)
    assert [line.split()[0] for line in lines[1:]] == ["center", "ten-crop"]
    assert ("40.9 G" if ten else "?  ") in lines[2]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (657_434_000_000, "657 G"),
        (1_603_000_000_000, "1,603 G"),
        (19_060_000_000, "19.1 G"),
        (1_000_000_000, "1 G"),
        (172_000_000, "172 M"),
        (17_177_216, "17.2 M"),
        (40_000, "0.04 M"),
    ],
)
def test_multiply_adds_are_printed_as_in_the_tables_of_the_paper(count: int, text: str) -> None:
    assert in_units(count) == text


def test_the_verb_lists_every_protocol_for_the_papers_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["protocols"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == "Models A, B and C, crop 224 px; an image of 375x500 pixels (height x width)"
    assert {line.split()[0] for line in lines[3:12]} == {
        *(set(PROTOCOL_NAMES) - {"dense-S"}),
        "dense-256",
        "dense-384",
        "dense-480",
    }
    assert "multiply-adds" not in printed
    assert "The cost depends on the net; to show it: prelunet protocols --model" in printed


def test_multi_scale_of_a_net_trained_at_one_scale_is_not_called_that_of_table_6() -> None:
    one_scale = replace(paper_contract(), default_scales=(384,))
    sources = {cost.name: cost.source for cost in protocol_costs(one_scale, 375, 500)}
    assert sources["multi-scale"] == sources["dense-384"] == "PReLU-nets, Table 4, one scale"


def test_the_verb_prints_a_models_own_scales_and_cost(
    exported: dict[str, ExportedNet], capsys: pytest.CaptureFixture[str]
) -> None:
    model = exported["demo-image"]
    assert run(["protocols", "--model", str(model.path), "--image", "28x40", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["model"], document["crop"], document["image"]) == ("demo.onnx", 28, {"height": 28, "width": 40})
    costs = {cost["name"]: cost for cost in document["protocols"]}
    assert costs["multi-scale"]["scales"] == [32, 48, 60]
    views = [multiply_adds(architecture("demo"), *size, 23) for size in ((32, 46), (48, 69), (60, 86))]
    assert costs["multi-scale"]["multiply_adds"] == 2 * sum(views)
    assert costs["multi-scale"]["source"] == "PReLU-nets, Tables 4 and 6"
    assert run(["protocols", "--model", str(model.path), "--image", "28x40"]) == 0
    printed = capsys.readouterr().out
    assert "multiply-adds  x center" in printed
    assert "cannot do" not in printed


def test_the_documentation_states_the_counted_costs() -> None:
    text = " ".join((ROOT / "docs" / "protocols.md").read_text(encoding="utf-8").split())
    costs = by_name(protocol_costs(build_contract("A"), *IMAGENET))
    center, *others = (in_units(costs[name].multiply_adds) for name in ("center", "ten-crop", "multi-scale", "spp-18"))
    names = zip(others, ("ten-crop", "multi-scale", "spp-18"), strict=True)
    stated = [f"{center} multiply-adds for `center`", *(f"{cost} for `{name}`" for cost, name in names)]
    assert [part for part in stated if part not in text] == []


def test_the_drawing_of_the_documentation_is_the_one_that_its_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    draw = importlib.import_module("draw_protocols").draw
    assert (ROOT / "docs" / "images" / "protocols.svg").read_text(encoding="utf-8") == draw()


@pytest.mark.parametrize("size", ["375", "375x", "0x500", "375x500x3", "375,500", "1e2x5", "123456x1", "٣x٣"])
def test_an_image_size_that_is_none_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["protocols", "--image", size]) == 2
    assert "give height and width in pixels, e.g. --image 375x500" in capsys.readouterr().err
