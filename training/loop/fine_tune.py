"""Fine-tuning: a run whose initial weights come from a checkpoint.

Only the last layer depends on the classes, so it alone is reinitialized if they differ. Does not import torch.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...evaluator.architectures import Architecture
from ...evaluator.arrays import Float32Array
from ...evaluator.contract import ClassEntry
from ...evaluator.errors import UsageError
from ...evaluator.files import sha256_of
from ...evaluator.json_checks import differences, format_differences
from ..net.checkpoints import UNCHECKED, read_checkpoint, require_file
from ..net.initialization import Initialization, initial_tensors

LAST_LAYER = ("fc3.weight", "fc3.bias")


def sha256_of_checkpoint(path: Path) -> str:
    """Return the sha256 of an initial checkpoint; raises UsageError if it cannot be read or is a folder."""
    require_file(path)
    return sha256_of(path)


def load_pretrained(
    path: Path,
    net: Architecture,
    classes: tuple[ClassEntry, ...],
    seed: int,
    initialization: Initialization,
    mean_shape: tuple[int, ...],
    *,
    report: Callable[[str], None] = lambda _text: None,
) -> tuple[dict[str, Float32Array], Float32Array]:
    """Read the initial weights and the mean of a run from a checkpoint with the same architecture.

    Classes are compared by wnid. The same classes keep all tensors; if their order differs, the rows of fc3 are
    permuted. Otherwise `initial_tensors` draws fc3 with this seed. The crop may differ: the pyramid gives fc1 the same
    number of bins for any window (SPP-net, section 2.3, trains one net at 224 and 180).

    mean_shape: (3,) or (crop, crop, 3); report: receives messages on what is kept. Returns tensors with the names and
    shapes of `parameter_shapes`, and the mean, all float32.
    Raises UsageError with the differences if the architecture differs, and what `read_checkpoint` raises.
    """
    checkpoint = read_checkpoint(path)
    own, places = checkpoint.architecture, ("in the checkpoint", "in the recipe")
    if found := differences(own.to_json(), net.to_json(), ignored={("name",), ("crop",)}, places=places):
        # Nets with different names differ in dozens of layers; the names are enough.
        details = ". " if own.name != net.name else f":\n{format_differences(found)}\n"
        raise UsageError(
            f"{path}: the checkpoint's architecture ({own.name}, {own.activation}) differs from the recipe's "
            f"({net.name}, {net.activation}){details}"
            "Use a recipe with the checkpoint's architecture and activation, or a checkpoint that matches the recipe"
        )
    old, new = [entry.wnid for entry in checkpoint.classes], [entry.wnid for entry in classes]
    tensors = dict(checkpoint.tensors)
    if old == new:
        source = f"{path}, with the same {len(new)} classes"
    elif sorted(old) == sorted(new):
        rows = [old.index(wnid) for wnid in new]
        tensors |= {name: tensors[name][rows] for name in LAST_LAYER}
        source = f"{path}, with the same {len(new)} classes in another order; the rows of fc3 are permuted to match"
    else:
        drawn = initial_tensors(net, len(classes), seed, initialization)
        tensors |= {name: drawn[name] for name in LAST_LAYER}
        shared = len(set(old) & set(new))
        source = (
            f"{path}, except fc3, which is reinitialized: {shared} of the {len(new)} classes are among its {len(old)}"
        )
    report(f"initial weights from {source}")
    if checkpoint.unchecked:
        report(f"warning: {path}: {UNCHECKED}")
    # The checkpoint's features were learned with its mean, not with that of the new images. A mean image does not fit
    # another crop or the recipe's `mean = "channel"`; its channel means replace it.
    mean, kept = checkpoint.mean, f"mean: that of {path}, not of the training images"
    if mean.ndim == 1 or mean.shape == mean_shape:
        report(kept)
    else:
        cause = "the recipe asks for a channel mean" if mean_shape == (3,) else "it does not fit the crop"
        side, mean = len(mean), mean.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
        numbers = ", ".join(f"{value:.2f}" for value in mean)
        report(f"{kept}; of its mean image of {side}x{side} pixels the channel means ({numbers}), as {cause}")
    return tensors, np.broadcast_to(mean, mean_shape).copy()
