"""The nets of the paper as data: Tables 1 and 3 of PReLU-nets (He et al. 2015), and small ones for the demo.

Everything else (the torch net, the ONNX graph, the counts) is derived from these lists. Our choices where the paper
gives no value: conv1 pads 3 (224 → 112 requires it), pools round down, and model E's 2x2 convolutions pad 0, 1, 0, 1,
... so that its maps stay "dominantly" 36 and 18 pixels wide.
"""

import math
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from msgspec import Meta, Struct, convert, to_builtins
from msgspec.structs import replace

from .errors import UsageError


class TrunkLayer(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The geometry of one layer of the trunk, [kernel, stride, pad] in a model file; pools round down."""

    kernel: Annotated[int, Meta(ge=1)]
    stride: Annotated[int, Meta(ge=1)]
    pad: Annotated[int, Meta(ge=0)]

    def output_side(self, side: int) -> int:
        """Return the output rows (or columns) for `side` input rows; may be < 1 for tiny inputs."""
        return (side + 2 * self.pad - self.kernel) // self.stride + 1


def feature_map_side(trunk: Iterable[TrunkLayer], side: int) -> int:
    """Return the rows (columns) of the feature map of an image with `side` rows (columns)."""
    for layer in trunk:
        side = layer.output_side(side)
    return side


def trunk_stride(trunk: Iterable[TrunkLayer]) -> int:
    """Return the distance in pixels between two neighboring cells of the feature map."""
    return math.prod(layer.stride for layer in trunk)


Activation = Literal["prelu", "prelu-shared", "relu", "lrelu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
_LAYER_NAME = re.compile(r"(conv|pool)\d+(_\d+)?")
MAX_SIDE = 4096  # pixels; limit of a training crop and of the shorter side of a training image
MAX_HIDDEN = 65_536
MAX_LEVEL = 64  # bins per side; each bin is a node of the graph
MAX_PARAMETERS = 530_000_000  # in float32 nearly 2 GiB, the limit of an ONNX file
LRELU_SLOPE = 0.01  # PReLU-nets, section 2.1: the fixed slope of leaky ReLU

_Size: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SIDE)]
_Width: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_HIDDEN)]
_Level: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_LEVEL)]


class Conv(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="conv"):
    """One convolution, followed by its activation. Kernel, stride and pad in pixels of its input."""

    name: str
    channels: _Size
    kernel: _Size
    stride: _Size = 1
    pad: Annotated[int, Meta(ge=0, le=MAX_SIDE)] = 0


class Pool(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pool"):
    """One max pooling without padding, rounding down."""

    name: str
    kernel: _Size
    stride: _Size

    pad: ClassVar[int] = 0


class Architecture(Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """One net. spp_levels: bins per side, in the order of fc1's input; hidden: width of fc1 and fc2."""

    name: str
    trunk: tuple[Conv | Pool, ...]
    spp_levels: Annotated[tuple[_Level, ...], Meta(min_length=1)]
    hidden: _Width
    crop: int
    activation: Activation = "prelu"
    hidden2: _Width | None = None  # width of fc2, if it differs

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UsageError(f"unknown activation '{self.activation}'. Valid activations: {', '.join(ACTIVATIONS)}")
        for fault in self._faults():
            raise UsageError(f"architecture {self.name}: {fault}")
        self.check_size(classes=1)

    def _faults(self) -> Iterator[str]:
        """Yield what is wrong; each check relies on those before it."""
        if not 1 <= self.crop <= MAX_SIDE:
            yield f"the crop should be from 1 to {MAX_SIDE} px, not {self.crop}"
        if not self.convs:
            yield "the trunk has no convolution"
        names = [layer.name for layer in self.trunk]
        if len(set(names)) < len(names) or not all(_LAYER_NAME.fullmatch(name) for name in names):
            yield "layers need unique names such as conv2_1, pool2"
        side, sides = self.crop, [f"{self.crop} px"]
        for layer, size in zip(self.trunk, self.layers, strict=True):
            if layer.pad >= layer.kernel:
                yield f"the pad of {layer.name}, {layer.pad}, should be less than its kernel, {layer.kernel}"
            side = size.output_side(side)
            sides.append(f"{layer.name} {max(0, side)}")
            if side < 1:
                yield (
                    f"a crop of {self.crop} px is too small: its map vanishes at {layer.name} ({', '.join(sides)}). "
                    "Use a larger crop, smaller strides or fewer layers"
                )
        if self.trunk_stride > MAX_SIDE:
            yield f"the strides multiply to more than {MAX_SIDE} px. Use smaller ones"
        if side < (bins := max(self.spp_levels)):
            yield (
                f"a crop of {self.crop} px gives a {side}x{side} feature map, too small for {bins}x{bins} bins. "
                "Use a larger crop, smaller strides or fewer bins"
            )

    def check_size(self, classes: int) -> None:
        """Raise UsageError if the net has too many parameters for a model file."""
        if (count := sum(map(math.prod, parameter_shapes(self, classes).values()))) > MAX_PARAMETERS:
            raise UsageError(
                f"architecture {self.name}: {count:,} parameters with {classes:,} classes, but a model file holds at "
                f"most {MAX_PARAMETERS:,}. Use narrower layers or fewer bins"
            )

    @property
    def convs(self) -> tuple[Conv, ...]:
        return tuple(layer for layer in self.trunk if isinstance(layer, Conv))

    @cached_property  # like the window, asked for thousands of times while batches are planned
    def layers(self) -> tuple[TrunkLayer, ...]:
        return tuple(TrunkLayer(layer.kernel, layer.stride, layer.pad) for layer in self.trunk)

    def feature_map_side(self, side: int) -> int:
        return feature_map_side(self.layers, side)

    @cached_property
    def window(self) -> int:
        """Return the side of a window: that of the feature map of one training crop."""
        return self.feature_map_side(self.crop)

    @property
    def trunk_stride(self) -> int:
        return trunk_stride(self.layers)

    @property
    def channels(self) -> int:
        return self.convs[-1].channels

    @property
    def widths(self) -> tuple[int, int]:
        return self.hidden, self.hidden2 or self.hidden

    @property
    def bins(self) -> int:
        return sum(level * level for level in self.spp_levels)

    def slope_count(self, width: int) -> int:
        """Return the number of slopes that an activation over `width` channels learns."""
        return {"prelu": width, "prelu-shared": 1}.get(self.activation, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the architecture as plain data for checkpoints and model files."""
        plain = {key: value for key, value in to_builtins(self).items() if value is not None}
        return {**plain, "trunk": list(plain["trunk"]), "spp_levels": list(self.spp_levels)}


def architecture_from_json(data: Any) -> Architecture:
    """Create an architecture from the output of `Architecture.to_json`; raises ValueError for other data."""
    try:
        return convert(data, Architecture)
    except UsageError as error:  # of a net that cannot be
        raise ValueError(str(error)) from error


class OpaqueNet(Struct, frozen=True, omit_defaults=True):
    """A net whose layers are unknown, such as an adopted one. multiply_adds: of one crop, None if unknown."""

    name: str
    activation: str
    multiply_adds: Annotated[int, Meta(ge=1)] | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(to_builtins(self))


def net_from_json(data: Any) -> Architecture | OpaqueNet:
    """Create a net from its `to_json`, an `OpaqueNet` from data without a trunk; raises ValueError for other data."""
    return architecture_from_json(data) if isinstance(data, dict) and "trunk" in data else convert(data, OpaqueNet)


def parameter_shapes(architecture: Architecture, classes: int) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every tensor of a checkpoint, in order (docs/formats.md, "Checkpoint")."""
    shapes: dict[str, tuple[int, ...]] = {}
    fan_in = 3
    for conv in architecture.convs:
        shapes[f"{conv.name}.weight"] = (conv.channels, fan_in, conv.kernel, conv.kernel)
        shapes[f"{conv.name}.bias"] = (conv.channels,)
        if slopes := architecture.slope_count(conv.channels):
            shapes[f"{conv.name}.slope"] = (slopes,)
        fan_in = conv.channels
    widths = (architecture.bins * architecture.channels, *architecture.widths, classes)
    for index, name in enumerate(("fc1", "fc2", "fc3")):
        shapes[f"{name}.weight"] = (widths[index + 1], widths[index])
        shapes[f"{name}.bias"] = (widths[index + 1],)
        if name != "fc3" and (slopes := architecture.slope_count(widths[index + 1])):
            shapes[f"{name}.slope"] = (slopes,)
    return shapes


def _stages(first: int, per_stage: tuple[int, ...], widths: tuple[int, ...], pools: int) -> Iterator[Conv | Pool]:
    """Yield the 3x3 stages of models A, B and C, with a 2x2 pool after each of the first `pools` stages."""
    for stage, (count, width) in enumerate(zip(per_stage, widths, strict=True), start=first):
        for index in range(1, count + 1):
            yield Conv(f"conv{stage}_{index}", width, kernel=3, pad=1)
        if stage - first < pools:
            yield Pool(f"pool{stage}", kernel=2, stride=2)


def _large(name: str, convs: int, conv1: int, widths: tuple[int, int, int]) -> Architecture:
    """Build A, B or C of Table 3."""
    head = (Conv("conv1", conv1, kernel=7, stride=2, pad=3), Pool("pool1", kernel=2, stride=2))
    trunk = (*head, *_stages(2, (convs,) * 3, widths, pools=2))
    return Architecture(name, trunk, spp_levels=(7, 3, 2, 1), hidden=4096, crop=224)


def _stage_of_2x2(number: int, count: int, width: int) -> Iterator[Conv]:
    for i in range(count):
        yield Conv(f"conv{number}_{i + 1}", width, kernel=2, pad=i % 2)


def _small(name: str, extra: int = 0) -> Architecture:
    """Build the 14-layer model of Table 1 (model E of He & Sun 2015), with `extra` additional convolutions."""
    trunk: tuple[Conv | Pool, ...] = (
        Conv("conv1", 64, kernel=7, stride=2, pad=3),
        Pool("pool1", kernel=3, stride=3),
        *_stage_of_2x2(2, 4, 128),
        Pool("pool2", kernel=2, stride=2),
        *_stage_of_2x2(3, 6 + extra, 256),
    )
    return Architecture(name, trunk, spp_levels=(6, 3, 2, 1), hidden=4096, crop=224)


# The small net of the demo: stride 4, seconds to train on a CPU.
_DEMO = Architecture("demo", tuple(_stages(1, (2, 2, 2), (24, 48, 96), pools=2)), (3, 2, 1), hidden=256, crop=28)
# E30 in miniature: its 1 + 4 + 22 convolutions, narrow, with the stride of demo.
_DEMO30 = Architecture(
    "demo30",
    (
        Conv("conv1", 16, kernel=5, pad=2),
        Pool("pool1", kernel=2, stride=2),
        *_stage_of_2x2(2, 4, 32),
        Pool("pool2", kernel=2, stride=2),
        *_stage_of_2x2(3, 22, 48),
    ),
    spp_levels=(3, 2, 1),
    hidden=256,
    crop=28,
)
ARCHITECTURES: dict[str, Architecture] = {
    "A": _large("A", 5, 96, (256, 512, 512)),
    "B": _large("B", 6, 96, (256, 512, 512)),
    "C": _large("C", 6, 96, (384, 768, 896)),
    "E": _small("E"),
    "E30": _small("E30", extra=16),
    "demo": _DEMO,
    "demo30": _DEMO30,
}


def architecture(net: str | Architecture, *, activation: Activation = "prelu", crop: int | None = None) -> Architecture:
    """Return an architecture, or the built-in one of that name, with an activation and optionally another crop.

    Raises UsageError for an unknown name, or a crop that is too small for the net or above MAX_SIDE.
    """
    if isinstance(net, str) and net not in ARCHITECTURES:
        raise UsageError(
            f"unknown architecture '{net}'. Valid architectures: {', '.join(ARCHITECTURES)}, or a file FILE.toml"
        )
    base = ARCHITECTURES[net] if isinstance(net, str) else net
    return replace(base, activation=activation, crop=base.crop if crop is None else crop)


def multiply_adds(net: Architecture, height: int, width: int, classes: int) -> int:
    """Return the multiply-adds for one image: convolutions once, fc layers for every window.

    height, width: in pixels. For one crop this is the "complexity" of Table 3.
    """
    total, channels = 0, 3
    for layer, size in zip(net.trunk, net.layers, strict=True):
        height, width = size.output_side(height), size.output_side(width)
        if isinstance(layer, Conv):
            total += layer.kernel**2 * channels * layer.channels * height * width
            channels = layer.channels
    windows = max(0, height - net.window + 1) * max(0, width - net.window + 1)
    fc1, fc2 = net.widths
    return total + windows * (net.bins * channels * fc1 + fc1 * fc2 + fc2 * classes)
