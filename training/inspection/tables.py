"""The tables of `prelunet init`, `prelunet inspect`, `prelunet inspect --data` and `prelunet inspect RUN`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...evaluator.architectures import Architecture, parameter_shapes
from ...evaluator.terminal import escape_unprintable
from ..net.initialization import FC_LAYERS
from .layer_log import std
from .slope_trend import slope_trend

Layers = Sequence[Mapping[str, Any]]

_NEVER_POSITIVE = {
    True: "dead: share of the channels that are 0 for every image and so learn nothing.",
    False: "never > 0: share of the channels that use only the negative side on these images; dead with ReLU.",
}


def print_layers(net: Architecture, classes: int, console: Console) -> None:
    """Print the layers of a net, with the output of each for one training crop."""
    title = f"Layers of {escaped(net.name)}, for a crop of {net.crop}x{net.crop} pixels"
    table = _table(title, ("kernel", "output", "parameters"))
    counts = Counter[str]()
    for name, shape in parameter_shapes(net, classes).items():
        counts[name.partition(".")[0]] += math.prod(shape)
    side, channels = net.crop, 3
    for layer, size in zip(net.trunk, net.layers, strict=True):
        side, channels = size.output_side(side), getattr(layer, "channels", channels)
        kernel = f"{layer.kernel}x{layer.kernel}, stride {layer.stride}{f', pad {layer.pad}' if layer.pad else ''}"
        table.add_row(layer.name, kernel, f"{side}x{side}x{channels}", f"{counts[layer.name]:,}")
    bins = ", ".join(f"{level}x{level}" for level in net.spp_levels)
    table.add_row("pyramid", f"{bins} bins of the {side}x{side} window", f"{net.bins}x{channels}", "0")
    for name, width in zip(FC_LAYERS, (*net.widths, classes), strict=True):
        table.add_row(name, "", f"{width:,}", f"{counts[name]:,}")
    console.print(table)


def print_responses(layers: Layers, images: int, activation: str, console: Console) -> None:
    """Print a measurement, one row per layer."""
    relu = activation == "relu"
    headers = ("mean", "variance", "gradient variance", "dead" if relu else "never > 0", "slope")
    table = _table(f"Responses before the activation, on {images:,} images", headers)
    for layer in layers:
        spread = [_number(layer[key]) for key in ("mean", "variance", "gradient_variance")]
        table.add_row(escaped(layer["layer"]), *spread, _share(layer["never_positive"]), _slope(layer["slope"]))
    console.print(table)
    console.print("gradient variance: of the gradient of an image's own loss with respect to its response.")
    console.print(_NEVER_POSITIVE[relu])


def print_history(entries: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the first and the last measurement of a run side by side, and the slope trends of both."""

    def cells(layer: Mapping[str, Any]) -> list[str]:
        spread = [_number(std(layer, key)) for key in ("variance", "gradient_variance")]
        return [*spread, _share(layer["never_positive"]), _slope(layer["slope"])]

    first, last = entries[0], entries[-1]
    steps = f"step {first['step']:,} → step {last['step']:,}"
    headers = ("std of response", "std of gradient", "never > 0", "slope")
    table = _table(f"Layers during training: {len(entries)} measurements, {steps}", headers)
    for before, after in zip(first["layers"], last["layers"], strict=True):
        pairs = zip(cells(before), cells(after), strict=True)
        table.add_row(escaped(after["layer"]), *(old if old == new else f"{old} → {new}" for old, new in pairs))
    console.print(table)
    console.print("never > 0: share of the channels that are above 0 for no image; dead with ReLU.")
    for entry in (first, *entries[1:][-1:]):
        slopes = {layer["layer"]: layer["slope"] for layer in entry["layers"] if layer["slope"] is not None}
        if (trend := slope_trend(slopes)) is not None:
            console.print(escaped(f"Slopes at step {entry['step']:,}: {trend}."))


def _table(title: str, headers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("layer")
    for header in headers:
        table.add_column(header, justify="right")
    return table


def escaped(text: str) -> str:
    """Escape text from a file for the terminal: no markup, no control characters."""
    return escape(escape_unprintable(text))


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _slope(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
