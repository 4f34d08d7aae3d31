"""The requirements of the placement check on a model's final graph: a pure function of the output of place.py."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnx import GraphProto

CUDA = "CUDAExecutionProvider"
NHWC = "com.ms.internal.nhwc"  # the domain of kernels that have the channel last
LAYOUT_BOUND = ("Conv", "MaxPool")
# Tensors that may be transposed: masks, which have one channel, and the mean image, once per batch.
CHEAP = re.compile(r".*\.mask(\.fp16)?|mean\.warped")
OUTPUTS = 4


@dataclass(frozen=True)
class Verdict:
    """The result for one file. faults: why it fails, empty if it passes; the rest is for the table."""

    faults: tuple[str, ...]
    nodes: int = 0
    convolutions: int = 0
    transposes: int = 0
    kernels: int = 0
    uploads: int = 0


def judge(placed: Mapping[str, Any], graph: GraphProto) -> Verdict:
    """Judge whether a file runs entirely on CUDA.

    placed: output of place.py; graph: the final graph. Faults are a node on another provider, a copy between host and
    GPU, and, if NHWC was requested, a convolution or pool with the channel first or a transposed activation.
    """
    if "refused" in placed:
        return Verdict((f"refused: {placed['refused']}",))
    faults = [
        f"{count} nodes on {provider}" for provider, count in placed["nodes"].items() if provider != CUDA and count
    ]
    copies = [node for node in graph.node if node.op_type.startswith("Memcpy")]
    faults += [f"{node.op_type} of {node.input[0]}" for node in copies]
    transposed = [node.input[0] for node in graph.node if node.op_type == "Transpose"]
    bound = [node for node in graph.node if node.op_type in LAYOUT_BOUND]
    if placed["options"]["prefer_nhwc"] == "1":
        faults += [f"{node.op_type} {node.name} has the channel first" for node in bound if node.domain != NHWC]
        faults += [f"an activation is transposed: {name}" for name in transposed if not CHEAP.fullmatch(name)]
    for run in placed["runs"]:
        if run["copies"]["device to host"] > OUTPUTS:
            faults.append(f"{run['shape']}: {run['copies']['device to host']} copies to the host for {OUTPUTS} outputs")
    return Verdict(
        tuple(faults),
        nodes=len(graph.node),
        convolutions=sum(node.op_type == "Conv" for node in bound),
        transposes=len(transposed),
        kernels=max((run["kernels"] for run in placed["runs"]), default=0),
        uploads=max((run["copies"]["host to device"] for run in placed["runs"]), default=0),
    )
