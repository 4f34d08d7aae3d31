"""Bytes of a training step on several GPUs, by formula, and its duration, by a MODEL. Pure functions.

The bytes follow from the architecture alone. The times are modeled, not measured: GPUs of one rate, a network of one
bandwidth, nothing else. Rates and bandwidths are stated with each result.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from prelunet.evaluator.architectures import Architecture, architecture, multiply_adds, parameter_shapes
from prelunet.training.net.network import HEAD

CLASSES, BATCH = 1000, 128
BACKWARD = 2  # arithmetic relative to forward: gradients of the input and of the weights
NETS, SIZES = ("A", "B", "C"), (4, 8)
PAPER = {4: 3.8, 8: 6.0}  # section 4 "Multi-GPU implementation": A and B on four K20, C on eight K40


@dataclass(frozen=True)
class Hardware:
    """rate: FLOP/s of one GPU in a step; bandwidth: bytes/s in each direction at once; why: the sources of both."""

    name: str
    rate: float
    bandwidth: float
    feature_bytes: int
    why: str


@dataclass(frozen=True)
class Costs:
    """Of a net and a batch: parameters and forward multiply-adds of trunk and head, and number of feature values."""

    trunk_parameters: int
    head_parameters: int
    features: int
    trunk_multiply_adds: float
    head_multiply_adds: float


def costs(net: Architecture, classes: int, batch: int) -> Costs:
    """Return the costs of a net with `classes` classes at a batch size."""
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(net, classes).items()}
    head = {name: size for name, size in sizes.items() if name.split(".")[0] in HEAD}
    head_adds = sum(size for name, size in head.items() if name.endswith(".weight"))
    all_adds = multiply_adds(net, net.crop, net.crop, classes)
    return Costs(
        trunk_parameters=sum(sizes.values()) - sum(head.values()),
        head_parameters=sum(head.values()),
        features=batch * net.bins * net.channels,
        trunk_multiply_adds=batch * float(all_adds - head_adds),
        head_multiply_adds=batch * float(head_adds),
    )


def sent_bytes(kind: str, size: int, of: Costs, batch: int, feature_bytes: int = 4) -> dict[str, float]:
    """Return the bytes that all processes together send in a step, by purpose.

    An all-reduce by a ring sends 2·(size−1) times its tensor; the loss and the stop request are two more values.
    """
    values = of.trunk_parameters + (of.head_parameters if kind == "ddp" else 0) + 2
    sums = 2.0 * (size - 1) * 4 * values
    if kind != "hybrid":
        return {"gradients": sums}
    others = 1 - (batch // size) / batch  # share of the rows that are not in the first process
    features = others * of.features * feature_bytes
    return {"gradients": sums, "features": features, "feature gradients": features, "labels": others * batch * 8}


def hardware() -> tuple[Hardware, ...]:
    """Return the modeled hardware."""
    a = costs(architecture("A"), CLASSES, BATCH)
    flops = 2 * (1 + BACKWARD) * (a.trunk_multiply_adds + a.head_multiply_adds)
    k20 = flops / (2.6 * PAPER[4])
    kepler = "the paper's 2.6 s for A's batch of 128 on four K20, which its 3.8x makes 9.9 s on one"
    return (
        Hardware("K20", k20, 6e9, 4, f"rate: {kepler}; bandwidth: assumed for PCIe 2.0 x16 (8 GB/s at most)"),
        Hardware("K40", k20 * 4.29 / 3.52, 10e9, 4, f"rate: {kepler}, in proportion to the peaks, 3.52 and 4.29 "
                 "TFLOP/s; bandwidth: assumed for PCIe 3.0 x16 (16 GB/s at most)"),
        Hardware("H100", 400e12, 300e9, 2, "assumed: 400 TFLOP/s in bf16, 300 GB/s over NVLink; features in bf16"),
    )  # fmt: skip


def model() -> dict[str, Any]:
    """Return the modeled speed-ups of A, B, C on 4 and 8 GPUs at the paper's batch, and their assumptions."""
    rows = [
        _modelled(name, size, one)
        for one in hardware()
        for name in NETS
        for size in SIZES
        if one.name == "H100" or (one.name == "K40") == (size == 8)  # as in the paper: four K20, eight K40
    ]
    return {"batch": BATCH, "classes": CLASSES, "hardware": [asdict(one) for one in hardware()], "rows": rows}


def _modelled(name: str, size: int, on: Hardware) -> dict[str, Any]:
    """Return the times of one step on one GPU and on `size`, in seconds, and what Amdahl's law allows.

    Gradients are sent during backward as long as it lasts ("hidden"), or after it ("not hidden"). Features and their
    gradients pass the first GPU's link one after the other, and nothing is computed meanwhile. Weight updates are
    omitted.
    """
    of = costs(architecture(name), CLASSES, BATCH)
    trunk, head = (2 * (1 + BACKWARD) * adds / on.rate for adds in (of.trunk_multiply_adds, of.head_multiply_adds))
    alone = trunk + head
    row: dict[str, Any] = {"net": name, "gpus": size, "hardware": on.name, "seconds_alone": alone}
    row["head_share"] = head / alone
    row["amdahl_hybrid"] = alone / (trunk / size + head)
    for kind in ("ddp", "hybrid"):
        sent = sent_bytes(kind, size, of, BATCH, on.feature_bytes)
        gradients = sent["gradients"] / size / on.bandwidth
        serial = (head if kind == "hybrid" else 0.0) + 2 * sent.get("features", 0.0) / on.bandwidth
        shared = (trunk if kind == "hybrid" else alone) / size
        hidden = min(gradients, shared * BACKWARD / (1 + BACKWARD))
        row[kind] = {
            "mb_sent_by_all": sum(sent.values()) / 1e6,
            "speedup_hidden": alone / (shared + serial + gradients - hidden),
            "speedup_not_hidden": alone / (shared + serial + gradients),
        }
    return row
