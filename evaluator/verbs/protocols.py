"""`prelunet protocols`: the evaluation protocols and their costs."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import Annotated

import typer

from ..contract import default_scales
from ..engine.load import open_session
from ..engine.protocol_costs import ProtocolCost, paper_contract, protocol_costs
from ..errors import UsageError
from ..terminal import echo, table_lines

UNKNOWN = "?"
HEADERS = ("protocol", "kind", "scales", "views", "windows", "multiply-adds", "x center", "from")
COSTS = ("multiply-adds", "x center")


def protocols(
    *,
    model: Annotated[Path | None, typer.Option(help="Model file; shows its scales and multiply-adds.")] = None,
    image: Annotated[
        str, typer.Option(help="Height and width of the image in pixels; the default is typical of ImageNet.")
    ] = "375x500",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the evaluation protocols and the cost of each."""
    if not (size := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", image, re.ASCII)):
        raise UsageError(f"--image {image}: give height and width in pixels, e.g. --image 375x500")
    height, width = int(size[1]), int(size[2])
    contract = paper_contract() if model is None else open_session(model, "auto").contract
    costs = protocol_costs(contract, height, width)
    if as_json:
        plain = [asdict(cost) for cost in costs]
        header = {"model": model and model.name, "crop": contract.crop, "image": {"height": height, "width": width}}
        echo(json.dumps({**header, "protocols": plain}, indent=2))
        return
    subject = "Models A, B and C" if model is None else f"{model.name}: {contract.name}"
    echo(f"{subject}, crop {contract.crop} px; an image of {height}x{width} pixels (height x width)\n")
    echo("\n".join(table(costs, with_cost=model is not None)))
    low, high = min(contract.default_scales), max(contract.default_scales)
    others = f"center-{high}" if contract.fixed_size else f"dense-{low}-{high} or center-{high}"
    echo(f"\nwindows: number averaged. For other scales, write e.g. {others}. See docs/protocols.md")
    if model is None:
        echo("The cost depends on the net; to show it: prelunet protocols --model MODEL.onnx")
    if (contract.crop, contract.default_scales) != (224, default_scales(224)):
        echo("from: the papers' scales are for crops of 224 pixels; those above are the model's")
    names: dict[str, list[str]] = {}  # reason → the protocols that it rules out
    for cost in costs:
        if cost.refusal is not None:
            names.setdefault(cost.refusal.removeprefix(f"protocol {cost.name}: "), []).append(cost.name)
    if names:
        refused = [f"  {', '.join(of_reason)}: {reason}" for reason, of_reason in names.items()]
        echo("\n".join(["\nThis model does not support:", *refused]))


def table(costs: Sequence[ProtocolCost], *, with_cost: bool) -> list[str]:
    """Return the lines of a table of the supported protocols. with_cost: include the total multiply-adds."""
    rows = [HEADERS, *(_row(cost) for cost in costs if cost.refusal is None)]
    shown = [with_cost or header not in COSTS for header in HEADERS]
    return table_lines([list(compress(row, shown)) for row in rows], right_aligned=("views", "windows", *COSTS))


def _row(cost: ProtocolCost) -> tuple[str, ...]:
    assert cost.scales is not None
    return (
        cost.name,
        str(cost.kind),
        ", ".join(map(str, cost.scales)),
        str(cost.views),
        f"{cost.windows:,}",
        UNKNOWN if cost.multiply_adds is None else in_units(cost.multiply_adds),
        UNKNOWN if cost.times_center is None else f"{cost.times_center:.1f}",
        cost.source,
    )


def in_units(count: int) -> str:
    """Format a number of multiply-adds as in the paper's tables: "657 G", "1,603 G", "19.1 G", "4.21 M"."""
    value, unit = (count / 1e9, "G") if count >= 1e9 else (count / 1e6, "M")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
