"""Fine-tuning: a training that begins with a checkpoint's weights instead of drawn ones.

Only the last layer knows the classes, so it alone is drawn anew where they are others. Imports no torch.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prelunet.evaluator.architectures import Architecture
from prelunet.evaluator.arrays import Float32Array
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.files import sha256_of
from prelunet.evaluator.json_checks import differences, format_differences
from prelunet.training.net.checkpoints import Checkpoint, read_checkpoint
from prelunet.training.net.initialization import Initialization, initial_tensors
from prelunet.training.run_state.run_folder import BEST_FILE, LAST_FILE

LAST_LAYER = ("fc3.weight", "fc3.bias")


@dataclass(frozen=True, eq=False)
class InitialWeights:
    """What a training begins with.

    tensors: float32, names and shapes of `parameter_shapes`; mean: float32 of the shape that was asked for;
    remarks: what a user should know.
    """

    tensors: dict[str, Float32Array]
    mean: Float32Array
    remarks: tuple[str, ...]


def sha256_of_checkpoint(path: Path) -> str:
    """Return the sha256 of a checkpoint to begin with; UsageError when it cannot be read, or is a folder."""
    _refuse_folder(path)
    return sha256_of(path)


def load_pretrained(
    path: Path,
    net: Architecture,
    classes: tuple[ClassEntry, ...],
    seed: int,
    initialization: Initialization,
    mean_shape: tuple[int, ...],
) -> InitialWeights:
    """Read a checkpoint of the same architecture as the beginning of a training of other, or the same, classes.

    The classes are told apart by their wnids. The same: all tensors as they are; in another order: fc3's rows follow;
    others: fc3 is what `initial_tensors` draws with this seed. The crop may be another: the pyramid gives fc1 as many
    bins of any window (SPP-net, section 2.3, trains one net at 224 and 180). mean_shape: (3,) or (crop, crop, 3).

    Raises UsageError that shows the difference when the architecture is another; what `read_checkpoint` raises.
    """
    _refuse_folder(path)
    checkpoint = read_checkpoint(path)
    _check_architecture(path, checkpoint.architecture, net)
    there, here = [entry.wnid for entry in checkpoint.classes], [entry.wnid for entry in classes]
    tensors = dict(checkpoint.tensors)
    if there == here:
        said = f"{path}, for the same {len(here)} classes"
    elif sorted(there) == sorted(here):
        rows = [there.index(wnid) for wnid in here]
        tensors |= {name: tensors[name][rows] for name in LAST_LAYER}
        said = f"{path}, for the same {len(here)} classes in another order, which fc3's rows follow"
    else:
        drawn = initial_tensors(net, len(classes), seed, initialization)
        tensors |= {name: drawn[name] for name in LAST_LAYER}
        shared = len(set(there) & set(here))
        said = (
            f"{path} but for fc3, which is drawn anew: {shared} of the {len(here)} classes are among its {len(there)}"
        )
    mean, about_mean = _mean_for(checkpoint, mean_shape)
    return InitialWeights(tensors, mean, (f"begins with the weights of {said}", *about_mean))


def _refuse_folder(path: Path) -> None:
    """Refuse a folder in the place of a checkpoint; where it is a run's, name the checkpoints in it."""
    if path.is_dir():
        there = [str(path / name) for name in (LAST_FILE, BEST_FILE) if (path / name).is_file()]
        raise UsageError(f"{path}: a folder, not a checkpoint. Give {' or '.join(there) or 'the path of a checkpoint'}")


def _check_architecture(path: Path, there: Architecture, here: Architecture) -> None:
    """Refuse another trunk, pyramid, width or activation; what it is called and the crop do not matter."""
    places = ("in the checkpoint", "in the recipe")
    if found := differences(there.to_json(), here.to_json(), ignored={("name",), ("crop",)}, places=places):
        # Nets of two names differ in dozens of layers, and the names say it all
        what = ". " if there.name != here.name else f":\n{format_differences(found)}\n"
        raise UsageError(
            f"{path}: a net of another architecture ({there.name}, {there.activation}) than the recipe's "
            f"({here.name}, {here.activation}){what}"
            "Take a recipe with the checkpoint's architecture and activation, or a checkpoint of the recipe's"
        )


def _mean_for(checkpoint: Checkpoint, shape: tuple[int, ...]) -> tuple[Float32Array, tuple[str, ...]]:
    """Return the checkpoint's mean in another shape: its features were learned with it, not with that of new images.

    A mean image fits no other crop: there the mean of each of its channels stands for it.
    """
    mean = checkpoint.mean
    if mean.shape == shape:
        return mean, ()
    if mean.ndim == 1:
        return np.broadcast_to(mean, shape).copy(), ()
    channels = mean.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
    side = len(mean)
    numbers = ", ".join(f"{value:.2f}" for value in channels)
    remark = f"the mean image of {side}x{side} pixels does not fit; the mean of its channels is taken: {numbers}"
    return np.broadcast_to(channels, shape).copy(), (remark,)
