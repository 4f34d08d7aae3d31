"""What a net costs, told from its architecture's data alone (`prelunet.architecture` in docs/contract.md)."""

from collections.abc import Mapping
from typing import Any

from prelunet.evaluator.contract import TrunkLayer, feature_map_side
from prelunet.evaluator.strict import a_list, an_object, one_of, whole


def multiply_adds(architecture: Mapping[str, Any], height: int, width: int, classes: int) -> int:
    """Return the multiply-adds of one image of that size: convolutions once, fc layers for every window.

    architecture: what `Architecture.to_json` gives; height, width: in pixels. At one crop this is the "complexity" of
    Table 3. Raises ValueError for data that tells of no such net.
    """
    layers = [an_object(layer, "a layer") for layer in a_list(architecture.get("trunk"), "trunk")]
    trunk = [_size_of(layer) for layer in layers]
    window = feature_map_side(trunk, whole(architecture.get("crop"), "crop", 1))
    hidden = whole(architecture.get("hidden"), "hidden", 1)
    levels = a_list(architecture.get("spp_levels"), "spp_levels")
    bins = sum(whole(level, "a level of the pyramid", 1) ** 2 for level in levels)
    total, channels = 0, 3
    for layer, size in zip(layers, trunk, strict=True):
        height, width = size.output_side(height), size.output_side(width)
        if one_of(layer.get("kind"), "kind of a layer", ("conv", "pool")) == "conv":
            filters = whole(layer.get("channels"), "channels of a layer", 1)
            total += size.kernel**2 * channels * filters * height * width
            channels = filters
    windows = max(0, height - window + 1) * max(0, width - window + 1)
    return total + windows * (bins * channels * hidden + hidden * hidden + hidden * classes)


def _size_of(layer: Mapping[str, Any]) -> TrunkLayer:
    """Return a layer as far as sizes are concerned; pools, whose data have no pad, pad nothing."""
    kernel, stride = (whole(layer.get(key), f"{key} of a layer", 1) for key in ("kernel", "stride"))
    return TrunkLayer(kernel, stride, whole(layer.get("pad", 0), "pad of a layer", 0))
