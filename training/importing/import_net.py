"""Import of a net trained elsewhere as a checkpoint (docs/importing.md).

The net must have one of the supported architectures. Its tensors are renamed and converted to float32. Its
preprocessing is folded into the mean and conv1, since the nets here take RGB from 0 to 255 with only a mean subtracted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from ...evaluator.architectures import Architecture, parameter_shapes
from ...evaluator.arrays import Float32Array
from ...evaluator.contract import ClassEntry
from ...evaluator.errors import CheckpointError, UsageError, from_os_error
from ...evaluator.files import sha256_of
from ..net.checkpoints import Checkpoint, is_finite, tensor_faults
from .name_map import NameMap, Renamed
from .preprocessing import Preprocessing, parse_channel_values
from .state_dicts import StateDict, read_state_dict

AssignmentMethod = Literal["by name", "by the map", "by order"]
Shapes = Mapping[str, tuple[int, ...]]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAP_HINT = "map the names with a table: --map FILE (docs/importing.md)"


@dataclass(frozen=True)
class ImportResult:
    """An imported checkpoint.

    source: name in the checkpoint → name in the file; method: how they were assigned; remarks: messages to the user
    about conversions.
    """

    checkpoint: Checkpoint
    source: Mapping[str, str]
    method: AssignmentMethod
    remarks: tuple[str, ...]


def import_net(
    path: Path,
    net: Architecture,
    classes: tuple[ClassEntry, ...],
    preprocessing: Preprocessing,
    *,
    mean: Float32Array | None = None,
    name_map: NameMap | None = None,
) -> ImportResult:
    """Convert a torch state dict or a .safetensors file of the same architecture to a checkpoint.

    classes: in the order of the rows of the last layer; preprocessing: applied to pixels in training; mean: a mean
    image (crop, crop, 3) in the same range and channel order, which replaces the mean of `preprocessing`; name_map:
    from the file's names to the checkpoint's. Without a map, either the names or the order of all shapes must match.

    Raises CheckpointError for a file that cannot be read without running code, is damaged, does not match (the message
    lists all faults) or contains numbers that are not finite; UsageError for invalid arguments.
    """
    state = read_state_dict(path)
    shapes = parameter_shapes(net, len(classes))
    # In some files, a layer's shared slope has no axes.
    tensors = {name: tensor.reshape(1) if tensor.ndim == 0 else tensor for name, tensor in state.tensors.items()}
    source, method, left_out = _assign(path, StateDict(tensors, state.ordered), shapes, name_map)
    chosen = {name: tensors[source[name]] for name in shapes}
    arrays = {name: tensor.detach().to(torch.float32).numpy() for name, tensor in chosen.items()}
    if bad := [source[name] for name, array in arrays.items() if not is_finite(array)]:
        raise CheckpointError(
            f"{path}: values that are not finite in float32, in {', '.join(bad)}: training has diverged, or the file "
            "is damaged. Use an earlier state of the net"
        )
    first = net.convs[0].name + ".weight"
    arrays[first], own_mean = _fold_preprocessing(path, arrays[first], preprocessing, mean)
    kinds = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in chosen.values())
    remarks = list(state.remarks)
    for kind, count in kinds.items():
        if kind != "float32":  # float64 loses digits, shorter types lose nothing
            remarks.append(
                f"{count} tensors of {kind} were {'rounded' if kind == 'float64' else 'converted'} to float32"
            )
    if left_out:
        remarks.append(f"omitted by the map: {', '.join(left_out)}")
    provenance = {"parent_sha256": sha256_of(path), "environments": []}
    checkpoint = Checkpoint(net, classes, own_mean, arrays, provenance=provenance)
    return ImportResult(checkpoint, source, method, tuple(remarks))


def read_mean_image(path: Path, crop: int) -> Float32Array:
    """Read a mean image from a .npy file: (crop, crop, 3), or (3, crop, crop) as in Caffe.

    Returns (crop, crop, 3), channels in the order of the file. Raises UsageError for anything else.
    """
    try:
        image = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise from_os_error(error) from error
    except (ValueError, EOFError, BadZipFile) as error:
        raise UsageError(f"{path}: not a numpy array ({error}). Write the mean image with numpy.save") from error
    is_numeric = isinstance(image, np.ndarray) and image.dtype.kind in "fui"
    if is_numeric and image.shape == (3, crop, crop):
        image = image.transpose(1, 2, 0)
    if not is_numeric or image.shape != (crop, crop, 3):
        content = f"{list(image.shape)} of {image.dtype}" if isinstance(image, np.ndarray) else "several arrays"
        raise UsageError(
            f"{path}: {content}, but a mean image should be [{crop}, {crop}, 3] or [3, {crop}, {crop}] numbers. Crop "
            "it, or give the mean of each channel: --mean M,M,M"
        )
    with np.errstate(over="ignore"):  # infinite values are rejected later
        return np.array(image, dtype=np.float32)


def parse_preprocessing(
    mean: str, std: str, pixel_range: int, channels: Literal["rgb", "bgr"], crop: int
) -> tuple[Preprocessing, Float32Array | None]:
    """Parse `--mean`, `--std`, `--range` and `--channels`; also return the mean image if `--mean` names one.

    For a mean image, the preprocessing contains its channel means, so that a wrong range is detected too. Raises
    UsageError for inconsistent numbers.
    """
    image = read_mean_image(Path(mean), crop) if mean.endswith(".npy") else None
    if image is None:
        numbers = parse_channel_values(mean, "--mean")
    else:
        red, green, blue = (float(number) for number in image.mean(axis=(0, 1), dtype=np.float64))
        numbers = (red, green, blue)
    return Preprocessing(numbers, parse_channel_values(std, "--std"), pixel_range, channels), image


def _assign(
    path: Path, state: StateDict, shapes: Shapes, name_map: NameMap | None
) -> tuple[Mapping[str, str], AssignmentMethod, tuple[str, ...]]:
    """Return name in the checkpoint → name in the file, how they were assigned, and the names that the map omits.

    Raises CheckpointError with a list of all faults.
    """
    found = {name: (_kind(tensor), tuple(tensor.shape)) for name, tensor in state.tensors.items()}
    source: Mapping[str, str] = {name: name for name in found}
    method: AssignmentMethod = "by name"
    renamed, fix = Renamed(source), "Check --arch, --activation and --classes"
    if name_map is not None:
        renamed = name_map.rename(found)
        source, method = renamed.source, "by the map"
        fix += ", or fix the map (docs/importing.md)"
    elif not found.keys() & shapes.keys():
        if obstacle := _why_not_by_order(state, shapes):
            fix = f"They cannot be assigned by order: {obstacle}. {fix}, or {_MAP_HINT}"
        else:
            source, method = dict(zip(shapes, found, strict=True)), "by order"
    elif found.keys() != shapes.keys():
        fix += f", or {_MAP_HINT}"
    faults = [*renamed.faults, *_faults_of(source, found, shapes)]
    if faults:  # all of them, because users write a name map from the list
        head = f"{path}: the tensors do not match the requested net. {fix}. Mismatches:"
        raise CheckpointError("\n  ".join((head, *faults)))
    return source, method, renamed.left_out


def _faults_of(
    source: Mapping[str, str], found: Mapping[str, tuple[str, tuple[int, ...]]], shapes: Shapes
) -> list[str]:
    """Return all faults of an assignment, with the name in the file where it differs."""
    faults = tensor_faults({name: found[source[name]] for name in source}, shapes, "float")
    renamed = {name: f" ({source[name]} in the file)" for name in source if source[name] != name}
    return [fault + renamed.get(name, "") for name, fault in faults.items()]


def _kind(tensor: Tensor) -> str:
    """Return `float` if the tensor can be converted to float32, else its actual type."""
    return "float" if tensor.dtype in _FLOATS else str(tensor.dtype).removeprefix("torch.")


def _why_not_by_order(state: StateDict, shapes: Shapes) -> str | None:
    """Return why the tensors cannot be assigned by order, or None if every shape fits.

    A bias and the slopes of a layer have the same shape, so names that end in "bias" must be in positions of biases.
    """
    if not state.ordered:
        return "a .safetensors file stores its tensors sorted, not in the order of the layers"
    if len(state.tensors) != len(shapes):
        return f"there are {len(state.tensors)} tensors, but the net has {len(shapes)}"
    names_biases = any(name.endswith("bias") for name in state.tensors)
    pairs = zip(state.tensors.items(), shapes.items(), strict=True)
    for position, ((name, tensor), (own, shape)) in enumerate(pairs, start=1):
        if tuple(tensor.shape) != shape:
            return f"tensor {position} is {name} {list(tensor.shape)}, but {own} {list(shape)} is expected"
        if names_biases and name.endswith("bias") != own.endswith("bias"):
            return f"tensor {position} is {name}, but {own} is expected"
    return None


def _fold_preprocessing(
    path: Path, conv1: Float32Array, preprocessing: Preprocessing, image: Float32Array | None
) -> tuple[Float32Array, Float32Array]:
    """Return conv1's weights and the mean for RGB from 0 to 255.

    With r the range of pixels: (x·r/255 − mean) / std = (x − mean·255/r) · r/(255·std). The factor is folded into the
    weights of its channel. conv1 pads with zeros, which the factor leaves unchanged, so this is exact at the borders.
    """
    assert preprocessing.mean is not None, "an imported net does not take bytes"
    assert preprocessing.std is not None
    factor = preprocessing.pixel_range / (255 * np.array(preprocessing.std, dtype=np.float64))
    mean = np.array(preprocessing.mean if image is None else image, dtype=np.float64) * 255 / preprocessing.pixel_range
    weights = conv1 * factor[:, None, None]
    if preprocessing.channels == "bgr":
        weights, mean = weights[:, ::-1], mean[..., ::-1]
    with np.errstate(over="ignore"):  # a factor may be 1e38
        folded = np.ascontiguousarray(weights, dtype=np.float32)
    if not is_finite(folded):
        raise CheckpointError(f"{path}: conv1's weights times --range / (255 · --std) overflow float32. Check --std")
    return folded, np.ascontiguousarray(mean, dtype=np.float32)
