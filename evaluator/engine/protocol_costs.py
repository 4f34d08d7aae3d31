"""What each protocol shows of an image and what that costs, computed without running a model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..architectures import OpaqueNet, TrunkLayer
from ..contract import ClassEntry, ModelContract, default_scales
from ..errors import UsageError
from ..imaging.resize import resized_size
from ..protocols import PROTOCOL_NAMES, EvaluationProtocol, ProtocolKind, build_protocol
from .scores import nine_places

SOURCES: Mapping[str, str] = {  # keys: PROTOCOL_NAMES
    "center": "PReLU-nets, Fig. 2",
    "ten-crop": "PReLU-nets, Tables 2 and 5",
    "multi-scale": "PReLU-nets, Tables 4 and 6",
    "spp-18": "SPP-net, section 3.1.5",
    "spp-net": "ours, at SPP-net's scales",
    "resnet": "ResNet, section 3.4",
    "dense-S": "PReLU-nets, Table 4, one scale",
}


@dataclass(frozen=True)
class ProtocolCost:
    """What a protocol shows of one image, and what that costs.

    scales: pixels; views: their number; windows: number of averaged windows over all views;
    multiply_adds: of trunk and head for all windows that the graph computes, averaged or not; None if the model file
    does not state it; times_center: multiply_adds relative to `center`, or None likewise;
    source: origin of the protocol; refusal: why this model does not support it; then all numbers are None.
    """

    name: str
    source: str
    kind: ProtocolKind | None = None
    scales: tuple[int, ...] | None = None
    views: int | None = None
    windows: int | None = None
    multiply_adds: int | None = None
    times_center: float | None = None
    refusal: str | None = None


def paper_contract() -> ModelContract:
    """Return a contract with the sizes that models A, B and C share, for use without a model file."""
    halving = TrunkLayer(kernel=2, stride=2, pad=0)
    return ModelContract(
        architecture=OpaqueNet("A, B, C", "prelu"),  # the models differ in their channels
        classes=(ClassEntry("any", "any"),),
        mean_kind="image",
        trunk=(TrunkLayer(kernel=7, stride=2, pad=3), halving, halving, halving),  # 3x3 convolutions keep the size
        window=14,
        spp_levels=(7, 3, 2, 1),
        crop=224,
        default_scales=default_scales(224),
        max_side=4096,
        canvas="ragged",
        precision="fp32",
        checkpoint_sha256="",
    )


def protocol_costs(contract: ModelContract, height: int, width: int) -> list[ProtocolCost]:
    """Return the cost of each protocol for an image of height x width pixels, `center` first.

    `dense-S` is listed once per default scale of the model. `multi-scale` of a net trained at one scale has that scale
    only, so it is Table 4's evaluation, not that of Table 6.
    """
    costs: list[ProtocolCost] = []
    sources = {**SOURCES, "multi-scale": SOURCES["dense-S"]} if len(contract.default_scales) == 1 else SOURCES
    for entry in PROTOCOL_NAMES:
        names = [f"dense-{scale}" for scale in contract.default_scales] if entry == "dense-S" else [entry]
        for name in names:
            try:
                protocol = build_protocol(name, contract)
            except UsageError as error:
                costs.append(ProtocolCost(name, sources[entry], refusal=str(error)))
            else:
                costs.append(_cost_of(protocol, sources[entry], contract, (height, width)))
    center = costs[0].multiply_adds
    if center is None:
        return costs
    return [
        replace(cost, times_center=round(cost.multiply_adds / center, 2)) if cost.multiply_adds else cost
        for cost in costs
    ]


def _cost_of(
    protocol: EvaluationProtocol, source: str, contract: ModelContract, image: tuple[int, int]
) -> ProtocolCost:
    """Sum the costs of a protocol's views."""
    windows, total, crop = 0, 0, protocol.crop
    for view in protocol.views:
        whole = resized_size(*image, view.scale, protocol.long_side_cap, protocol.preparation)
        size = whole if crop is None else (crop, crop)
        rows, columns = contract.window_grid(*size)
        windows += len(nine_places(rows)) * len(nine_places(columns)) if view.part == "nine" else rows * columns
        total += contract.multiply_adds(*size) or 0  # a file states all counts or none
    return ProtocolCost(
        protocol.name, source, protocol.kind, protocol.scales, len(protocol.views), windows, total or None
    )
