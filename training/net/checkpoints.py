"""Checkpoints: a `.safetensors` file with weights and JSON metadata (docs/formats.md, "Checkpoint").

Does not import torch, so that checkpoints can be read without it. Imports safetensors only to read a file.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import numpy as np
from msgspec import Meta, convert

from ...evaluator.architectures import (
    MAX_SIDE,
    Architecture,
    architecture_from_json,
    multiply_adds,
    parameter_shapes,
)
from ...evaluator.arrays import Float32Array
from ...evaluator.contract import ClassEntry, parse_provenance
from ...evaluator.errors import CheckpointError, UsageError
from ...evaluator.files import open_atomically, require_regular_file
from ...evaluator.json_checks import parse_json

Parsed = TypeVar("Parsed")

CHECKPOINT_VERSION = 1
PREFIX = "prelunet."
MAX_PIXEL = 255  # largest pixel value, and so the largest mean
MEAN_TENSOR = "mean"  # present if prelunet.mean is "image"
UNCHECKED = "has no prelunet.sha256 (files of prelunet 1.0 have none), so damage to its numbers would go unnoticed"
_DIGEST_KEY = f"{PREFIX}sha256"
_FIX_HINT = "Use another checkpoint, or recreate this one with `prelunet init` or `prelunet train`"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A net with its weights and their origin.

    mean: float32 (3,), or (crop, crop, 3) for a mean image; RGB, 0-255; subtracted after mirroring.
    tensors: float32, exactly the names and shapes of `evaluator.architectures.parameter_shapes`.
    recipe, dataset, metrics, provenance: plain JSON data, or None if unknown.
    unchecked: read from a file without a sha256 of its content.
    """

    architecture: Architecture
    classes: tuple[ClassEntry, ...]
    mean: Float32Array
    tensors: Mapping[str, Float32Array]
    recipe: Mapping[str, Any] | None = None
    dataset: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] | None = None
    unchecked: bool = False


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically; equal checkpoints give equal bytes.

    Raises CheckpointError for tensors that are missing, have the wrong shape or are not finite (a diverged run must not
    replace a good file); UsageError or EnvironmentFault if the path cannot be written.
    """
    is_image = checkpoint.mean.ndim == 3
    tensors = dict(checkpoint.tensors)
    if is_image:
        tensors[MEAN_TENSOR] = checkpoint.mean
    elif checkpoint.mean.shape != (3,) or not all(0 <= value <= MAX_PIXEL for value in checkpoint.mean):
        raise CheckpointError(
            f"{path}: the mean should be three numbers from 0 to {MAX_PIXEL}, or an image, not {checkpoint.mean!r}"
        )
    expected = _expected_shapes(checkpoint.architecture, len(checkpoint.classes), mean_image=is_image)
    _check_names(path, {name: (str(t.dtype), t.shape) for name, t in tensors.items()}, expected, "float32")
    for name, tensor in tensors.items():
        _check_finite(path, name, tensor)
    values: dict[str, Any] = {
        "version": CHECKPOINT_VERSION,
        "architecture": checkpoint.architecture.to_json(),
        "classes": [entry.to_json() for entry in checkpoint.classes],
        "mean": "image" if is_image else [float(str(value)) for value in checkpoint.mean],  # these digits give float32
        "recipe": checkpoint.recipe,
        "dataset": checkpoint.dataset,
        "metrics": checkpoint.metrics,
        **({} if checkpoint.provenance is None else {"provenance": checkpoint.provenance}),
    }
    metadata = {PREFIX + key: json.dumps(values[key], sort_keys=True, allow_nan=False) for key in sorted(values)}
    metadata[_DIGEST_KEY] = json.dumps(_digest(metadata, tensors))
    with open_atomically(path) as file:
        _write_safetensors(file, {name: tensors[name] for name in expected}, metadata)


def require_file(path: Path) -> None:
    """Raise UsageError unless a path is a file; for the folder of a run, name the checkpoints in it."""
    if path.is_dir():
        files = [str(file) for name in ("last", "best") if (file := path / f"{name}.safetensors").is_file()]
        raise UsageError(f"{path}: a folder, not a checkpoint. Give {' or '.join(files) or 'the path of a checkpoint'}")
    require_regular_file(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and validate a checkpoint; code in the file is never run.

    Raises CheckpointError if the file is not a safetensors file, is truncated, has no prelunet metadata or a newer
    version, if its content does not have its sha256, or if its tensors are not finite float32 with the names and shapes
    of its architecture; UsageError if it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    require_file(path)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = _Metadata(path, file.metadata() or {})
            architecture = metadata.parse("architecture", architecture_from_json)
            classes, mean = metadata.parse("classes", _parse_classes), metadata.parse("mean", _parse_mean)
            expected = _expected_shapes(architecture, len(classes), mean_image=mean is None)
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            found = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
            _check_names(path, found, expected, "F32")
            tensors = {name: file.get_tensor(name) for name in expected}  # a single copy, from the mapped file
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror or error}). Give the path of a checkpoint"
        ) from error
    except SafetensorError as error:
        with path.open("rb") as head:
            has_header = head.read(9)[8:] == b"{"
        if not has_header:
            raise CheckpointError(f"{path}: not a checkpoint: not a safetensors file ({error}). {_FIX_HINT}") from error
        raise CheckpointError(
            f"{path}: damaged: its {path.stat().st_size} bytes do not match its header, as after an interrupted copy "
            f"or download ({error}). Copy it again, or use another checkpoint"
        ) from error
    if _DIGEST_KEY in metadata.texts and metadata.parse("sha256", str) != _digest(metadata.texts, tensors):
        raise CheckpointError(
            f"{path}: damaged: tensors or metadata do not have the sha256 that it states. Copy it again, or use "
            f"another checkpoint. If you changed it on purpose, remove '{_DIGEST_KEY}' from its metadata"
        )
    for name, tensor in tensors.items():
        _check_finite(path, name, tensor)
    return Checkpoint(
        architecture=architecture,
        classes=classes,
        mean=tensors.pop(MEAN_TENSOR) if mean is None else mean,
        tensors=tensors,
        recipe=metadata.parse("recipe", partial(_parse_recipe, architecture.crop)),
        dataset=metadata.parse("dataset", _parse_optional),
        metrics=metadata.parse("metrics", _parse_optional),
        provenance=metadata.parse("provenance", parse_provenance) if f"{PREFIX}provenance" in metadata.texts else None,
        unchecked=_DIGEST_KEY not in metadata.texts,
    )


def _digest(texts: Mapping[str, str], tensors: Mapping[str, Float32Array]) -> str:
    """Return the sha256 of a checkpoint's metadata and tensors (evaluator/contract.md)."""
    digest = hashlib.sha256()
    for key in sorted(texts):
        if key.startswith(PREFIX) and key != _DIGEST_KEY:
            digest.update(f"{key} {texts[key]}\n".encode())
    for name in sorted(tensors):
        digest.update(f"{name} F32 {json.dumps(tensors[name].shape)}\n".encode())
        digest.update(np.ascontiguousarray(tensors[name], dtype="<f4").data)
    return digest.hexdigest()


def _expected_shapes(architecture: Architecture, classes: int, *, mean_image: bool) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every tensor in the file, in the order of writing."""
    shapes = parameter_shapes(architecture, classes)
    if mean_image:
        shapes[MEAN_TENSOR] = (architecture.crop, architecture.crop, 3)
    return shapes


def tensor_faults(
    found: Mapping[str, tuple[str, tuple[int, ...]]], expected: Mapping[str, tuple[int, ...]], dtype: str
) -> dict[str, str]:
    """Return name → description for every tensor that is missing, unexpected, or has the wrong shape or type.

    found: name → type and shape; expected: name → shape.
    """
    faults = {name: f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found}
    for name, (kind, shape) in found.items():
        if name not in expected:
            faults[name] = f"unexpected {name} {list(shape)}"
        elif shape != expected[name]:
            faults[name] = f"{name} is {list(shape)}, should be {list(expected[name])}"
        elif kind != dtype:
            faults[name] = f"{name} is {kind}, should be {dtype}"
    return faults


def is_finite(tensor: Float32Array) -> bool:
    """Return whether all values are finite; minimum and maximum suffice, without a mask as large as the tensor."""
    return bool(np.isfinite(tensor.min()) and np.isfinite(tensor.max()))


def _check_names(
    path: Path,
    found: Mapping[str, tuple[str, tuple[int, ...]]],
    expected: Mapping[str, tuple[int, ...]],
    dtype: str,
) -> None:
    if faults := tensor_faults(found, expected, dtype):
        raise CheckpointError(
            f"{path}: the tensors do not match the architecture in the metadata: "
            f"{'; '.join(sorted(faults.values()))}. {_FIX_HINT}"
        )


def _check_finite(path: Path, name: str, tensor: Float32Array) -> None:
    if not is_finite(tensor):
        raise CheckpointError(
            f"{path}: {name} contains values that are not finite: training has diverged, or the file is damaged. "
            "Use an earlier checkpoint, or train with a lower learning rate"
        )


def _write_safetensors(file: BinaryIO, tensors: Mapping[str, Float32Array], metadata: Mapping[str, str]) -> None:
    """Write the safetensors format: 8 bytes of header length, the header as JSON, then the tensors consecutively.

    The library's writer orders the metadata randomly (version 0.8), so equal checkpoints would differ in sha256.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(np.ascontiguousarray(tensor, dtype="<f4").data)


class _Metadata:
    """Reader of the metadata; raises CheckpointError with the name of the key for every fault."""

    def __init__(self, path: Path, texts: Mapping[str, str]) -> None:
        self.path, self.texts = path, texts
        if f"{PREFIX}version" not in texts:
            raise CheckpointError(
                f"{path}: a safetensors file, but not a prelunet checkpoint (no metadata). {_FIX_HINT}"
            )
        version = self.parse("version", partial(convert, type=Annotated[int, Meta(ge=1)]))
        if version > CHECKPOINT_VERSION:
            raise CheckpointError(
                f"{path}: checkpoint version {version}, but this prelunet supports versions up to "
                f"{CHECKPOINT_VERSION}. Install a newer prelunet"
            )

    def parse(self, key: str, parse_value: Callable[[Any], Parsed]) -> Parsed:
        """Return parse_value(value), which raises ValueError for an invalid value."""
        if PREFIX + key not in self.texts:
            raise CheckpointError(f"{self.path}: no '{PREFIX}{key}' in the metadata. {_FIX_HINT}")
        try:
            return parse_value(parse_json(self.texts[PREFIX + key]))
        except ValueError as error:
            raise CheckpointError(f"{self.path}: '{PREFIX}{key}' is malformed ({error}). {_FIX_HINT}") from error


def _parse_classes(value: Any) -> tuple[ClassEntry, ...]:
    classes = convert(value, tuple[ClassEntry, ...])
    if [entry.to_json() for entry in classes] != value:
        raise ValueError("a class has more than wnid and name")
    if not classes or len({entry.wnid for entry in classes}) != len(classes):
        raise ValueError("empty, or a duplicate wnid")
    return classes


def _parse_mean(value: Any) -> Float32Array | None:
    """Return the three channel means, or None if the mean is an image."""
    if value == "image":
        return None
    # Check types explicitly: numpy would convert true and "1" to numbers.
    if (
        type(value) is not list
        or len(value) != 3
        or not all(type(number) in {int, float} and 0 <= number <= MAX_PIXEL for number in value)
    ):
        raise ValueError(f"neither three numbers from 0 to {MAX_PIXEL} nor 'image'")
    return np.array(value, dtype=np.float32)


def _parse_optional(value: Any) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise ValueError("neither an object nor null")
    return value


def _parse_recipe(crop: int, value: Any) -> dict[str, Any] | None:
    """Return the recipe. Only its `scales` are checked: they define `multi-scale` in a model file."""
    recipe = _parse_optional(value)
    if recipe is not None and "scales" in recipe:
        scales = recipe["scales"]
        if not isinstance(scales, list) or len(scales) != 2 or any(type(scale) is not int for scale in scales):
            raise ValueError("scales should be two integers, the lowest and the highest")
        if not crop <= scales[0] <= scales[1] <= MAX_SIDE:
            raise ValueError(f"scales should ascend from the crop ({crop}) to at most {MAX_SIDE}")
    return recipe


def size_summary(checkpoint: Checkpoint, path: Path) -> str:
    """Return a line with the number of parameters and multiply-adds and the file size, for the verbs' output."""
    net = checkpoint.architecture
    parameters = sum(tensor.size for tensor in checkpoint.tensors.values())
    operations = multiply_adds(net, net.crop, net.crop, len(checkpoint.classes))
    return (
        f"{parameters:,} parameters, {operations:.4g} multiply-adds for one {net.crop}x{net.crop} crop, "
        f"{path.stat().st_size / 1e6:,.1f} MB"
    )
