"""Import: a net that somebody trained elsewhere becomes a checkpoint (docs/importing.md).

Its architecture must be one of ours. Its names become ours, its numbers float32, and what its training did to pixels
goes into the mean and conv1, since the nets here see RGB from 0 to 255 with a mean subtracted and nothing else.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from prelunet.evaluator.architectures import ACTIVATIONS, ARCHITECTURES, Architecture, architecture, parameter_shapes
from prelunet.evaluator.arrays import Float32Array
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.errors import CheckpointError, UsageError, from_os_error
from prelunet.training.importing.name_map import NameMap, Renamed
from prelunet.training.importing.preprocessing import Preprocessing, parse_channel_values
from prelunet.training.importing.state_dicts import StateDict, read_state_dict
from prelunet.training.net.checkpoints import Checkpoint, is_finite, tensor_faults

AssignmentMethod = Literal["by name", "by the map", "by order"]
Shapes = Mapping[str, tuple[int, ...]]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Assignment:
    """Which tensor of the file becomes which of ours. theirs: our name → the file's."""

    source: Mapping[str, str]
    method: AssignmentMethod


@dataclass(frozen=True)
class ImportResult:
    """A checkpoint made of a file of others. remarks: what was done on the way that a user should know."""

    checkpoint: Checkpoint
    assignment: Assignment
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
    """Turn a torch state dict or a .safetensors file of the same architecture into a checkpoint.

    classes: in the order of the rows of its last layer. preprocessing: how its training prepared pixels. mean: an
    image instead of the three numbers of `preprocessing`, (crop, crop, 3) in the same range and order of channels.
    name_map: from its names to ours; without one the names must be ours, or all shapes in order those of the net.

    Raises CheckpointError for a file that cannot be read without running code, is damaged, does not fit (all faults at
    once) or holds numbers that are not finite; UsageError for what was asked in a wrong way.
    """
    state = read_state_dict(path)
    shapes = parameter_shapes(net, len(classes))
    tensors = {name: tensor.reshape(1) if _is_scalar(tensor) else tensor for name, tensor in state.tensors.items()}
    assignment, left_out = _assign(path, StateDict(tensors, state.ordered), shapes, name_map)
    chosen = {name: tensors[assignment.source[name]] for name in shapes}
    arrays = _as_float32(path, chosen, assignment)
    first = net.convs[0].name + ".weight"
    arrays[first], own_mean = _fold_preprocessing(path, arrays[first], preprocessing, mean)
    remarks = [*state.remarks, *_conversions(chosen)]
    if left_out:
        remarks.append(f"left out as the map says: {', '.join(left_out)}")
    return ImportResult(Checkpoint(net, classes, own_mean, arrays), assignment, tuple(remarks))


def read_mean_image(path: Path, crop: int) -> Float32Array:
    """Read a mean image from a .npy file: (crop, crop, 3), or (3, crop, crop) as Caffe has it.

    Returns (crop, crop, 3), channels in the order of the file. Raises UsageError for anything else.
    """
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise from_os_error(error) from error
    except (ValueError, EOFError, BadZipFile) as error:
        raise UsageError(f"{path}: no array of numpy ({error}). Write the mean image with numpy.save") from error
    is_image = isinstance(found, np.ndarray) and found.dtype.kind in "fui"
    if is_image and found.shape == (3, crop, crop):
        found = found.transpose(1, 2, 0)
    if not is_image or found.shape != (crop, crop, 3):
        what = f"{list(found.shape)} of {found.dtype}" if isinstance(found, np.ndarray) else "several arrays"
        raise UsageError(
            f"{path}: {what}, but a mean image is [{crop}, {crop}, 3] or [3, {crop}, {crop}] numbers. Cut it to the "
            "crop, or give the mean of each channel: --mean M,M,M"
        )
    with np.errstate(over="ignore"):  # what is infinite then is refused with its value
        return np.array(found, dtype=np.float32)


def parse_preprocessing(
    mean: str, std: str, pixel_range: int, channels: Literal["rgb", "bgr"], crop: int
) -> tuple[Preprocessing, Float32Array | None]:
    """Read what `--mean` and its companions say; the second is the mean image where --mean names one.

    Of an image the means of its channels stand in the first, so that a wrong range is found out for it, too. Raises
    UsageError for numbers that do not belong together.
    """
    image = read_mean_image(Path(mean), crop) if mean.endswith(".npy") else None
    if image is None:
        numbers = parse_channel_values(mean, "--mean")
    else:
        red, green, blue = (float(number) for number in image.mean(axis=(0, 1), dtype=np.float64))
        numbers = (red, green, blue)
    return Preprocessing(numbers, parse_channel_values(std, "--std"), pixel_range, channels), image


def _is_scalar(tensor: Tensor) -> bool:
    """Whether it has no axis at all, as some write the one slope of a layer."""
    return tensor.ndim == 0 and tensor.layout == torch.strided


def _assign(
    path: Path, state: StateDict, shapes: Shapes, name_map: NameMap | None
) -> tuple[Assignment, tuple[str, ...]]:
    """Find the file's tensor for each of ours; the second is what the map leaves out.

    Raises CheckpointError that says what is probably wrong, and then lists all that is amiss.
    """
    found = {name: (_kind(tensor), tuple(tensor.shape)) for name, tensor in state.tensors.items()}
    source: Mapping[str, str] = {name: name for name in found}
    method: AssignmentMethod = "by name"
    renamed = Renamed(source)
    if name_map is not None:
        renamed = name_map.rename(found)
        source, method, fix = renamed.source, "by the map", "Mend the map (docs/importing.md)"
    elif found.keys() == shapes.keys():
        fix = "The names are ours already; write the net again with these shapes, in numbers of floating point"
    elif found.keys() & shapes.keys():
        fix = "Name the others in a table: --map FILE (docs/importing.md)"
    elif obstacle := _why_not_by_order(state, shapes):
        fix = f"By order they cannot be assigned: {obstacle}. Name them in a table: --map FILE (docs/importing.md)"
    else:
        source, method = dict(zip(shapes, found, strict=True)), "by order"
        fix = "Write the net again with numbers of floating point"
    if renamed.faults or _faults_of(source, found, shapes):
        raise _mismatch_error(path, source, found, shapes, renamed.faults, fix)
    return Assignment(source, method), renamed.left_out


def _faults_of(
    source: Mapping[str, str], found: Mapping[str, tuple[str, tuple[int, ...]]], shapes: Shapes
) -> list[str]:
    """Return every fault of an assignment, with the file's name where that is another."""
    faults = tensor_faults({name: found[source[name]] for name in source}, shapes, "float")
    renamed = {name: f" ({source[name]} in the file)" for name in source if source[name] != name}
    return [fault + renamed.get(name, "") for name, fault in faults.items()]


def _kind(tensor: Tensor) -> str:
    """Return `float` for what can become float32, else what the tensor is instead."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return "without values" if tensor.is_meta else "sparse"
    return "float" if tensor.dtype in _FLOATS else str(tensor.dtype).removeprefix("torch.")


def _why_not_by_order(state: StateDict, shapes: Shapes) -> str | None:
    """Return what stands against taking the tensors as they come, None if every shape fits.

    Another number of classes does not stand against it: it would be a fault with any names. A bias and the slopes have
    the same shape: where biases are called so, they must come where biases are due.
    """
    if not state.ordered:
        return "a .safetensors file keeps its names sorted, not in the order of the layers"
    if len(state.tensors) != len(shapes):
        return f"there are {len(state.tensors)} tensors, but the net has {len(shapes)}"
    says_bias = any(name.endswith("bias") for name in state.tensors)
    classes = _classes_of([tuple(tensor.shape) for tensor in state.tensors.values()], shapes)
    pairs = zip(state.tensors.items(), _with_classes(shapes, classes).items(), strict=True)
    for place, ((name, tensor), (own, shape)) in enumerate(pairs, start=1):
        if tuple(tensor.shape) != shape:
            return f"at place {place} comes {name} {list(tensor.shape)}, but {own} {list(shape)} is due"
        if says_bias and name.endswith("bias") != own.endswith("bias"):
            return f"at place {place} comes {name}, but {own} is due"
    return None


def _mismatch_error(
    path: Path,
    source: Mapping[str, str],
    found: Mapping[str, tuple[str, tuple[int, ...]]],
    shapes: Shapes,
    faults_of_map: tuple[str, ...],
    fix: str,
) -> CheckpointError:
    """Return the error: first what is probably wrong and how to mend it, below it every fault.

    All of them, however many: a table of names is written from this list.
    """
    found_shapes = [found[name][1] for name in source.values()]
    requested, classes = shapes["fc3.bias"][0], _classes_of(found_shapes, shapes)
    numbers = f"the number of classes: the file has {classes}, --classes says {requested}"
    if classes not in (None, requested):
        if faults_of_map or _faults_of(source, found, _with_classes(shapes, classes)):
            cause = f"the tensors do not fit the net that was asked for, to begin with {numbers}. {fix}"
        else:
            cause = f"everything fits but {numbers}. Give --classes {classes}, or a file of {classes} names"
    elif classes is None and (likely := " or ".join(_nets_of_these_shapes(found_shapes, requested))):
        # No word of names: under the wrong net a table of them does not help.
        cause = f"not the net that was asked for. All shapes together are those of {likely}"
    else:
        cause = f"the tensors do not fit the net that was asked for. {fix}"
    faults = [*faults_of_map, *_faults_of(source, found, shapes)]
    return CheckpointError("\n  ".join((f"{path}: {cause}. What does not fit:", *faults)))


def _with_classes(shapes: Shapes, classes: int | None) -> Shapes:
    """Return a net's shapes with another number of classes; as they are for None."""
    if classes is None:
        return shapes
    return {**shapes, "fc3.weight": (classes, shapes["fc3.weight"][1]), "fc3.bias": (classes,)}


def _classes_of(found: Sequence[tuple[int, ...]], shapes: Shapes) -> int | None:
    """Return the number of classes with which the net has the shapes found, in whatever order; None if with none."""
    below = Counter(shape for name, shape in shapes.items() if not name.startswith("fc3."))
    counted = Counter(found)
    last = sorted((counted - below).elements(), key=len)
    if below - counted or [len(shape) for shape in last] != [1, 2]:
        return None
    classes = last[0][0]
    return classes if classes > 0 and last[1] == (classes, shapes["fc3.weight"][1]) else None


def _nets_of_these_shapes(found: Sequence[tuple[int, ...]], requested: int) -> Iterator[str]:
    """Yield the options for which the tensors have the right shapes, in whatever order."""
    for name in ARCHITECTURES:
        for activation in ACTIVATIONS:
            classes = _classes_of(found, parameter_shapes(architecture(name, activation=activation), requested))
            if classes is not None:
                also = "" if classes == requested else f" --classes {classes}"
                yield f"--arch {name} --activation {activation}{also}"


def _as_float32(path: Path, tensors: Mapping[str, Tensor], assignment: Assignment) -> dict[str, Float32Array]:
    """Return the numbers as float32; CheckpointError that names every tensor with one that is not finite."""
    arrays = {name: tensor.detach().resolve_neg().to(torch.float32).numpy() for name, tensor in tensors.items()}
    if bad := [assignment.source[name] for name, array in arrays.items() if not is_finite(array)]:
        raise CheckpointError(
            f"{path}: numbers that are not finite in float32, in {', '.join(bad)}: the training has diverged, or the "
            "file is damaged. Take an earlier state of the net"
        )
    return arrays


def _conversions(tensors: Mapping[str, Tensor]) -> list[str]:
    """Say what became float32 that was not: of float64 digits are lost, of the short types nothing."""
    kinds = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values())
    return [
        f"{count} tensors of {kind} were {'rounded' if kind == 'float64' else 'converted'} to float32"
        for kind, count in kinds.items()
        if kind != "float32"
    ]


def _fold_preprocessing(
    path: Path, conv1: Float32Array, preprocessing: Preprocessing, image: Float32Array | None
) -> tuple[Float32Array, Float32Array]:
    """Return conv1's weights and the mean for RGB from 0 to 255.

    With r the range of pixels: (x·r/255 − mean) / std = (x − mean·255/r) · r/(255·std). The factor goes into the
    weights of its channel; the zeros with which conv1 pads are zeros before and after it, so this is exact at the
    borders, too.
    """
    assert preprocessing.mean is not None, "a net here takes no bytes"
    assert preprocessing.std is not None
    factor = preprocessing.pixel_range / (255 * np.array(preprocessing.std, dtype=np.float64))
    mean = np.array(preprocessing.mean if image is None else image, dtype=np.float64) * 255 / preprocessing.pixel_range
    weights = conv1 * factor[:, None, None]
    if preprocessing.channels == "bgr":
        weights, mean = weights[:, ::-1], mean[..., ::-1]
    with np.errstate(over="ignore"):  # a factor may be 1e38
        folded = np.ascontiguousarray(weights, dtype=np.float32)
    if not is_finite(folded):
        raise CheckpointError(f"{path}: conv1's weights times --range / (255 · --std) are beyond float32. Check --std")
    return folded, np.ascontiguousarray(mean, dtype=np.float32)
