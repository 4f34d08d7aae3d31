"""Description of a checkpoint or a model file, with its learned slopes beside those of the paper.

Model files are read without torch, onnx and safetensors, which are imported only for checkpoints.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from ...evaluator.architectures import (
    Architecture,
    OpaqueNet,
    architecture_from_json,
    multiply_adds,
    parameter_shapes,
)
from ...evaluator.contract import ClassEntry, parse_calibration, provenance_lines, rewrite_hint
from ...evaluator.engine.load import open_session
from ...evaluator.engine.session import Session
from ...evaluator.errors import ContractError, from_os_error
from ...evaluator.files import open_regular, sha256_of
from ...evaluator.preparation import ANTIALIASED
from ..net.checkpoints import UNCHECKED, read_checkpoint
from .slope_trend import slope_trend
from .tables import escaped, print_layers

# PReLU-nets, Table 1 (model E): layer → learned slope (channel-shared), and mean of the channel-wise slopes.
PAPER_SLOPES: dict[str, tuple[float, float]] = {
    "conv1": (0.681, 0.596),
    "conv2_1": (0.103, 0.321),
    "conv2_2": (0.099, 0.204),
    "conv2_3": (0.228, 0.294),
    "conv2_4": (0.561, 0.464),
    "conv3_1": (0.126, 0.196),
    "conv3_2": (0.089, 0.152),
    "conv3_3": (0.124, 0.145),
    "conv3_4": (0.062, 0.124),
    "conv3_5": (0.008, 0.134),
    "conv3_6": (0.210, 0.198),
    "fc1": (0.063, 0.074),
    "fc2": (0.031, 0.075),
}
_SLOPE_KEYS = ("layer", "channels", "mean", "min", "max", "below_zero", "above_one")
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors format
_ONNX_FIRST_BYTE = b"\x08"  # the tag of ir_version, the first field of a serialized ModelProto


def inspect_file(path: Path) -> dict[str, Any]:
    """Return a description of the file as plain data; its type is detected from the content, not from the name.

    Common keys: kind (`checkpoint` or `model`), file, sha256, architecture, classes, parameters, slope_parameters,
    multiply_adds (one crop), window, trunk_stride, mean, recipe, dataset, metrics, provenance (or null), slopes
    (`summarize_slopes`, each with `paper`: the value of Table 1 or null), slope_trend (`SlopeTrend`, or null without
    slopes). A checkpoint also has unchecked (whether it states no sha256 of its content). A model also has precision,
    calibration (of int8, else null), canvas, default_scales, min_side, max_side, checkpoint_sha256, golden_images. An
    adopted net has kind `adopted`, crop, interpolation, preparation, precision and `adopted` (its preprocessing), and
    none of the keys specific to our own nets. Raises UsageError if the path cannot be read; CheckpointError or
    ContractError if the file is damaged.
    """
    try:
        with open_regular(path) as file:
            start = file.read(9)
    except OSError as error:
        raise from_os_error(error) from error
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= _LARGEST_HEADER:
        return _inspect_checkpoint(path)
    if start[:1] == _ONNX_FIRST_BYTE:
        return _inspect_model(path)
    raise ContractError(
        f"{path}: neither a checkpoint (safetensors) nor a model (ONNX), judging by its content. "
        "Give a file written by `prelunet init`, `prelunet train` or `prelunet export`"
    )


def summarize_slopes(tensors: Mapping[str, npt.NDArray[np.floating]]) -> list[dict[str, Any]]:
    """Summarize the learned slopes of each layer, in the order of `tensors`; other tensors are ignored.

    Each entry: layer, channels (1 for a shared slope), mean, min, max, and the number of slopes below_zero (the
    activation is not monotonic) and above_one (it amplifies negative values). Values have six digits, so that the text
    in a model file does not depend on a machine's summation order.
    """
    return [
        {
            "layer": name.removesuffix(".slope"),
            "channels": int(slope.size),
            "mean": round(float(slope.mean(dtype=np.float64)), 6),
            "min": round(float(slope.min()), 6),
            "max": round(float(slope.max()), 6),
            "below_zero": int((slope < 0).sum()),
            "above_one": int((slope > 1).sum()),
        }
        for name, slope in tensors.items()
        if name.endswith(".slope")
    ]


def add_paper_slopes(slopes: Sequence[Mapping[str, Any]], activation: str) -> list[dict[str, Any]]:
    """Add `paper` to each summary: the value of Table 1, or None unless the layers are exactly those of model E."""
    is_model_e = [entry["layer"] for entry in slopes] == list(PAPER_SLOPES)
    column = 0 if activation == "prelu-shared" else 1
    return [{**entry, "paper": PAPER_SLOPES[entry["layer"]][column] if is_model_e else None} for entry in slopes]


def _slopes_and_trend(slopes: Sequence[Mapping[str, Any]], activation: str) -> dict[str, Any]:
    trend = slope_trend({entry["layer"]: entry["mean"] for entry in slopes})
    return {"slopes": add_paper_slopes(slopes, activation), "slope_trend": trend and trend.to_json()}


def _inspect_checkpoint(path: Path) -> dict[str, Any]:
    checkpoint = read_checkpoint(path)
    is_image = checkpoint.mean.ndim == 3
    return {
        "kind": "checkpoint",
        "file": path.name,
        "sha256": sha256_of(path),
        **_describe_net(checkpoint.architecture, checkpoint.classes),
        "mean": {
            "kind": "image" if is_image else "channel",
            "channels": [round(float(v), 4) for v in checkpoint.mean.reshape(-1, 3).mean(axis=0, dtype=np.float64)],
        },
        "recipe": checkpoint.recipe,
        "dataset": checkpoint.dataset,
        "metrics": checkpoint.metrics,
        "provenance": checkpoint.provenance,
        "unchecked": checkpoint.unchecked,
        **_slopes_and_trend(summarize_slopes(checkpoint.tensors), checkpoint.architecture.activation),
    }


def _inspect_model(path: Path) -> dict[str, Any]:
    session = open_session(path, "cpu")
    contract = session.contract
    net = contract.architecture
    if isinstance(net, OpaqueNet):
        return _inspect_adopted(path, session)
    try:
        recorded = [{key: entry[key] for key in _SLOPE_KEYS} for entry in contract.training.get("slopes") or []]
        slopes = _slopes_and_trend(recorded, net.activation)
    except (LookupError, TypeError) as error:
        raise ContractError(
            f"{path}: 'prelunet.training' is malformed ({error!r}). {rewrite_hint(str(path))}"
        ) from error
    return {
        "kind": "model",
        "file": path.name,
        "sha256": session.model_sha256,
        **_describe_net(net, contract.classes),
        "mean": {"kind": contract.mean_kind, "channels": None},  # the mean itself is in the graph
        "precision": contract.precision,
        "calibration": contract.calibration and contract.calibration.to_json(),
        "canvas": contract.canvas,
        "default_scales": list(contract.default_scales),
        "min_side": contract.min_side,
        "max_side": contract.max_side,
        "checkpoint_sha256": contract.checkpoint_sha256,
        "golden_images": len(contract.golden),
        **{key: contract.training.get(key) for key in ("recipe", "dataset", "metrics", "provenance")},
        **slopes,
    }


def _inspect_adopted(path: Path, session: Session) -> dict[str, Any]:
    contract = session.contract
    return {
        "kind": "adopted",
        "file": path.name,
        "sha256": session.model_sha256,
        "architecture": contract.architecture.to_json(),
        "classes": [entry.to_json() for entry in contract.classes],
        "crop": contract.crop,
        "window": contract.window,
        "trunk_stride": contract.trunk_stride,
        "default_scales": list(contract.default_scales),
        "max_side": contract.max_side,
        "multiply_adds": contract.multiply_adds(contract.crop, contract.crop),
        "interpolation": contract.interpolation,
        "preparation": contract.preparation.to_json(),
        "precision": contract.precision,
        "adopted": contract.training.get("adopted", {}),
        "checkpoint_sha256": contract.checkpoint_sha256,
        "golden_images": len(contract.golden),
    }


def _describe_net(architecture: Architecture, classes: Sequence[ClassEntry]) -> dict[str, Any]:
    """Return the entries that follow from the architecture and the number of classes."""
    sizes = {name: int(np.prod(shape)) for name, shape in parameter_shapes(architecture, len(classes)).items()}
    return {
        "architecture": architecture.to_json(),
        "classes": [entry.to_json() for entry in classes],
        "parameters": sum(sizes.values()),
        "slope_parameters": sum(size for name, size in sizes.items() if name.endswith(".slope")),
        "multiply_adds": multiply_adds(architecture, architecture.crop, architecture.crop, len(classes)),
        "window": architecture.window,
        "trunk_stride": architecture.trunk_stride,
    }


def print_inspection(inspection: Mapping[str, Any], console: Console) -> None:
    """Print the result of `inspect_file` as tables: file, layers and slopes; only the first for an adopted net."""
    facts = Table(show_header=False, box=None, pad_edge=False, title=escaped(inspection["file"]), title_justify="left")
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    adopted = inspection["kind"] == "adopted"
    for name, fact in (_adopted_facts(inspection) if adopted else _facts(inspection)).items():
        lines = [fact] if isinstance(fact, str) else fact
        facts.add_row(name, "\n".join(map(escaped, lines)))
    console.print(facts)
    if adopted:
        return
    console.print()
    net = architecture_from_json(inspection["architecture"])
    print_layers(net, len(inspection["classes"]), console)
    activation = net.activation
    if inspection["slopes"]:
        console.print()
        _print_slopes(
            inspection["slopes"], inspection["slope_trend"], console, column=0 if activation == "prelu-shared" else 1
        )
    elif activation.startswith("prelu"):
        console.print("\nThis file records no slopes.")
    else:
        console.print(f"\nNo slopes: {activation} learns none.")


def _adopted_facts(inspection: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the table for an adopted net."""
    crop, cost = inspection["crop"], inspection["multiply_adds"]
    dense, side = inspection["max_side"] > crop, inspection["window"]
    made, adopted = inspection["preparation"], dict(inspection["adopted"])
    found = adopted.pop("found", None)
    resized = {"shorter": "resized", "squash": "squashed", "pad": "padded"}[made["resize"]]
    filtered = f"{inspection['interpolation']}{ANTIALIASED[made['antialias']]}"
    dense_facts = {
        "window": f"{side}x{side} cells of its feature map, stride {inspection['trunk_stride']} px",
        "scales": f"{', '.join(map(str, inspection['default_scales']))} px for multi-scale",
    }
    return {
        "kind": f"adopted: a third-party classifier, {'dense' if dense else 'of one size'}",
        "sha256": inspection["sha256"],
        "name": str(inspection["architecture"]["name"]),
        "crop": f"{crop}x{crop} px{'' if dense else ' only'}, {resized} with {filtered}",
        **(dense_facts if dense else {}),
        "classes": _classes_text(inspection["classes"]),
        "multiply-adds": f"{cost:.4g} for one crop" if cost is not None else "unknown",
        "precision": inspection["precision"],
        "adopted as": _data_text(adopted),
        **({} if found is None else {"found": _data_text(found)}),
        "net": f"{inspection['checkpoint_sha256']} (with its weights, and how it is fed)",
        "golden images": str(inspection["golden_images"]),
    }


def _facts(inspection: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """Return the rows of the first table; a list has several lines."""
    architecture, mean = inspection["architecture"], inspection["mean"]
    crop, window = architecture["crop"], inspection["window"]
    convs = sum(layer["kind"] == "conv" for layer in architecture["trunk"])
    channels = f" ({', '.join(f'{value:g}' for value in mean['channels'])})" if mean["channels"] else ""
    facts: dict[str, str | list[str]] = {
        "kind": inspection["kind"],
        "sha256": inspection["sha256"],
        "architecture": f"{architecture['name']}: {convs} convolutions, 3 fully connected layers",
        "activation": architecture["activation"],
        "crop": f"{crop} px: one window of {window}x{window}, stride {inspection['trunk_stride']} px",
        "classes": _classes_text(inspection["classes"]),
        "parameters": f"{inspection['parameters']:,}, of which {inspection['slope_parameters']:,} are slopes",
        "multiply-adds": f"{inspection['multiply_adds']:.4g} for one {crop}x{crop} crop",
        "mean": f"{mean['kind']}{channels}",
    }
    if inspection["kind"] == "model":
        facts["precision"] = inspection["precision"]
        if inspection["calibration"] is not None:
            facts["calibration"] = str(parse_calibration(inspection["calibration"]))
        facts["canvas"] = f"{inspection['canvas']}, sides {inspection['min_side']} to {inspection['max_side']} px"
        facts["scales"] = f"{', '.join(map(str, inspection['default_scales']))} px for multi-scale"
        facts["checkpoint"] = inspection["checkpoint_sha256"]
        facts["golden images"] = str(inspection["golden_images"])
    for key, missing in (("recipe", "none: untrained, or not recorded"), ("dataset", "none"), ("metrics", "none")):
        facts[key] = _data_text(inspection[key]) if inspection[key] else missing
    if inspection.get("unchecked"):
        facts["warning"] = f"it {UNCHECKED}"
    provenance = inspection["provenance"]
    if provenance and provenance["parent_sha256"]:
        facts["parent"] = provenance["parent_sha256"]
    facts["training"] = (provenance and provenance_lines(provenance)) or "none: untrained, or not recorded"
    return facts


def _print_slopes(
    slopes: Sequence[Mapping[str, Any]], trend: Mapping[str, Any] | None, console: Console, *, column: int
) -> None:
    """Print the slopes layer by layer, and their trend with depth; layers with slopes outside 0..1 are marked.

    column: of PAPER_SLOPES.
    """
    table = Table(title="Slopes of the negative side", title_justify="left", box=None, pad_edge=False)
    has_paper = slopes[0]["paper"] is not None
    for header in ("layer", "channels", "mean", *(["paper"] if has_paper else []), "min", "max", "< 0", "> 1"):
        table.add_column(header, justify="left" if header == "layer" else "right")
    for entry in slopes:
        paper = [f"{entry['paper']:.3f}"] if has_paper else []
        counts = [f"[yellow]{n} ![/]" if n else "0" for n in (entry["below_zero"], entry["above_one"])]
        numbers = [f"{entry['mean']:.3f}", *paper, f"{entry['min']:.3f}", f"{entry['max']:.3f}", *counts]
        table.add_row(escaped(entry["layer"]), str(entry["channels"]), *numbers)
    console.print(table)
    if any(entry["below_zero"] or entry["above_one"] for entry in slopes):
        console.print(
            "! < 0: the activation is not monotonic. > 1: it amplifies negative values. The paper allows both."
        )
    if has_paper:
        console.print("paper: Table 1 of He et al. 2015, model E trained on ImageNet. Every slope starts at 0.25.")
    if trend is not None:
        paper_trend = slope_trend({layer: values[column] for layer, values in PAPER_SLOPES.items()})
        console.print(escaped(f"Slopes of this net: {trend['text']}."))
        console.print(f"Slopes in the paper's Table 1: {paper_trend}.")


def _classes_text(classes: Sequence[Mapping[str, str]]) -> str:
    first = ", ".join(
        entry["wnid"] if entry["name"] == entry["wnid"] else f"{entry['wnid']} {entry['name']}" for entry in classes[:4]
    )
    return f"{len(classes)}: {first}{', …' if len(classes) > 4 else ''}"


def _data_text(data: Mapping[str, Any]) -> str:
    """Return recorded data on one line: `key value, key value`. The layers of an architecture have their own table."""
    if isinstance(net := data.get("architecture"), dict):
        data = {**data, "architecture": net.get("name")}
    return ", ".join(f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in data.items())
