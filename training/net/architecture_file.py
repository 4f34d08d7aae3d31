"""Architectures of one's own, read from TOML files (docs/training.md, "Your own architecture").

Layers are numbered like the built-in ones: conv2_1, conv2_2 and pool2 are those between the first and the second pool.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import convert

from ...evaluator.architectures import ARCHITECTURES, Architecture, Conv, Pool, architecture_from_json
from ...evaluator.errors import UsageError
from ...evaluator.files import read_toml
from ...evaluator.json_checks import require_int
from .checkpoints import read_checkpoint

ARCHITECTURE_HELP = (
    f"Architecture: {', '.join(ARCHITECTURES)}, a TOML file that describes one, or a checkpoint that has it."
)
_KEYS = ("crop", "trunk", "spp_levels", "hidden"), ("name",)  # required and optional ones
_LAYER_KEYS = {
    "conv": (("conv", "kernel"), ("stride", "pad", "repeat", "name")),
    "pool": (("pool", "stride"), ("name",)),
}
_NAME = re.compile(r"[\w.+-]{1,100}")
_MAX_REPEATS = 1000


def find_architecture(name_or_file: str, folder: Path = Path()) -> str | Architecture:
    """Return the architecture of a TOML file or a checkpoint, judging by the name's ending; other names unchanged.

    folder: to which the path is relative. Raises UsageError for a file that cannot be read or describes no possible
    net, CheckpointError for a damaged checkpoint.
    """
    path = folder / name_or_file
    if path.suffix == ".toml":
        return read_architecture(path)
    if path.suffix == ".safetensors":
        return read_checkpoint(path).architecture
    if name_or_file not in ARCHITECTURES and path.is_file():
        raise UsageError(f"{path}: an architecture file must end in .toml, and a checkpoint in .safetensors")
    return name_or_file


def read_architecture(path: Path) -> Architecture:
    """Read an architecture from a TOML file; raises UsageError with the key and the fix."""
    table = read_toml(
        path, "Give an existing file. If a run began with a file that is gone, give that run's RUN/last.safetensors"
    )
    try:
        _check_keys(table, *_KEYS)
        name = table.get("name", path.stem)
        if not isinstance(name, str) or name in ARCHITECTURES or not _NAME.fullmatch(name):
            raise ValueError(
                f"the name {name!a:.50} is a built-in architecture's, or not 1 to 100 letters, digits or .+-_. Set "
                "another with the key name"
            )
        if not isinstance(table["trunk"], list):
            raise ValueError("trunk should be a list of layers")
        values = {**table, "name": name, "trunk": list(_layers(table["trunk"]))}
        if isinstance(hidden := table["hidden"], list):
            if len(hidden) != 2:
                raise ValueError("hidden should be one width for both fc1 and fc2, or a list of two")
            values["hidden"], second = hidden
            values |= {} if second == hidden[0] else {"hidden2": second}
        return architecture_from_json(values)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _layers(trunk: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the layers in the form of `Architecture.to_json`, repeated and named."""
    layers: list[dict[str, Any]] = []
    for place, data in enumerate(trunk, start=1):
        try:
            layer = convert(data, dict[str, Any])
            kind = next((kind for kind in _LAYER_KEYS if kind in layer), None)
            if kind is None:
                raise ValueError("it needs the key conv, its number of channels, or pool, its kernel")
            _check_keys(layer, *_LAYER_KEYS[kind])
            count = require_int(layer.pop("repeat", 1), "repeat", 1, _MAX_REPEATS)
            layer = {"kind": kind, "channels" if kind == "conv" else "kernel": layer.pop(kind), **layer}
            convert({"name": "", **layer}, Conv | Pool)  # here, where its place in the file is known
            layers += [layer] * count
        except ValueError as error:
            raise ValueError(f"layer {place} of the trunk: {error}") from error
    stage, number = 1, 0
    for layer, following in zip(layers, [*layers, {"kind": "pool"}][1:], strict=True):
        if layer["kind"] == "pool":
            yield {"name": f"pool{stage}", **layer}
            stage, number = stage + 1, 0
        else:
            number += 1
            alone = number == 1 and following["kind"] == "pool"
            yield {"name": f"conv{stage}" if alone else f"conv{stage}_{number}", **layer}


def _check_keys(table: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    valid = (*required, *optional)
    if unknown := [key for key in table if key not in valid]:
        hint = "; set it with --activation or in the recipe" if unknown[0] == "activation" else ""
        raise ValueError(f"unknown key {unknown[0]!a:.40}{hint}. Valid keys: {', '.join(valid)}")
    if missing := [key for key in required if key not in table]:
        raise ValueError(f"no value for {', '.join(missing)}. Add the missing keys")
