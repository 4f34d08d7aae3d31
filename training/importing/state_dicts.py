"""Reading state dicts: the named tensors of a torch file or a `.safetensors` file.

Code in a file is never run: torch.load with weights_only=True rejects everything else in a pickle.
"""

import errno
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...evaluator.errors import CheckpointError, UsageError
from ...evaluator.files import open_regular
from ..net.checkpoints import PREFIX

_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")  # keys under which training scripts keep the net
_MAX_NESTING = 4  # levels of such keys; a pickle may contain itself
_SAVE = "torch.save(net.state_dict(), FILE)"


@dataclass(frozen=True)
class StateDict:
    """The tensors of a file, of any type and shape.

    ordered: whether they are in the order in which the net registered them; remarks: messages to the user.
    """

    tensors: Mapping[str, Tensor]
    ordered: bool
    remarks: tuple[str, ...] = ()


def read_state_dict(path: Path) -> StateDict:
    """Read a file written by torch.save or safetensors.

    The state dict may be nested under `state_dict`, `model_state_dict`, `model` or `net`. The prefixes of torch.compile
    (`_orig_mod.`) and DistributedDataParallel (`module.`) are removed from the names. Raises CheckpointError for a file
    that is damaged, of another format, already a prelunet checkpoint, or readable only by running its code; UsageError
    if it cannot be opened.
    """
    try:
        with open_regular(path) as file:
            head = file.read(9)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Give the path of an existing file") from error
    remarks: tuple[str, ...] = ()
    if head[8:] == b"{":  # 8 bytes of length, then a header in JSON
        tensors, ordered = _read_safetensors(path), False  # the usual writer sorts by type and name
    elif head.startswith((b"PK\x03\x04", b"\x80")):  # torch's archive, and the bare pickle of torch before 1.6
        tensors, remarks = _state_dict_in(path, _load(path))
        ordered = True
    else:
        raise CheckpointError(
            f"{path}: neither a torch.save file (.pt, .pth) nor a .safetensors file. Save one with {_SAVE}. For an "
            "ONNX file use prelunet adopt"
        )
    bare, prefix_remarks = _without_prefixes(tensors)
    return StateDict(bare, ordered, (*remarks, *prefix_remarks))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if f"{PREFIX}version" in (file.metadata() or {}):
                raise CheckpointError(
                    f"{path}: already a prelunet checkpoint, so there is nothing to import. Use `prelunet inspect` or "
                    "`prelunet export` with it"
                )
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _load(path: Path) -> Any:
    """Return the object stored by torch.save; only tensors and plain containers are allowed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old files, and about archives that are rejected below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for damaged files torch raises many other exceptions than its own
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a seek before the start of the file
            raise
        if needs := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise CheckpointError(
                f"{path}: contains more than tensors: {needs[1]}. Reading it would run code from the file; nothing was "
                f"run. Where the net was trained, save only its tensors: {_SAVE}"
            ) from error
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path}: a TorchScript program, not a state dict. Save only its tensors: "
                "torch.save(torch.jit.load(FILE).state_dict(), OTHER)"
            ) from error
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    why = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0][:200]  # without torch's advice
    return CheckpointError(
        f"{path}: damaged, or truncated by an interrupted copy or download ({path.stat().st_size} bytes; {why}). "
        f"Copy it again, or save it again with {_SAVE}"
    )


def _state_dict_in(path: Path, loaded: Any) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the state dict in the content of a file, and a remark about the keys under which it was found."""
    inside: list[str] = []
    while isinstance(loaded, Mapping) and len(inside) < _MAX_NESTING:
        keys = [key for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)]
        if not keys:
            break
        if len(keys) > 1:
            raise CheckpointError(
                f"{path}: contains several state dicts: {', '.join(keys)}. Save only one of them: "
                f"torch.save(torch.load(FILE)['{keys[0]}'], OTHER)"
            )
        inside.append(keys[0])
        loaded = loaded[keys[0]]
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        shown = ", ".join(repr(key)[:60] for key in list(loaded)[:8]) if isinstance(loaded, Mapping) else ""
        content = f"only the keys {shown}" if shown else f"only a {type(loaded).__name__}"
        raise CheckpointError(
            f"{path}: no state dict at the top level or under {', '.join(_WRAPPERS)}, {content}. Save one with {_SAVE}"
        )
    strange = [
        repr(name)[:60] for name, value in loaded.items() if not (isinstance(name, str) and isinstance(value, Tensor))
    ]
    if strange:
        raise CheckpointError(
            f"{path}: the state dict contains more than tensors: {', '.join(strange[:8])}. Save only tensors: {_SAVE}"
        )
    return dict(loaded), (f"the state dict was found under '{'.'.join(inside)}'",) if inside else ()


def _without_prefixes(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Remove the prefixes that torch.compile and DistributedDataParallel add to names."""
    remarks = []
    names = {name: ".".join(part for part in name.split(".") if part != "_orig_mod") for name in tensors}
    if list(names.values()) != list(tensors):
        remarks.append("the prefix '_orig_mod.' of torch.compile was removed from the names")
    while names and all(name.startswith("module.") for name in names.values()):
        names = {name: bare.removeprefix("module.") for name, bare in names.items()}
        remarks.append("the prefix 'module.' of DistributedDataParallel was removed from the names")
    return {names[name]: tensor for name, tensor in tensors.items()}, tuple(dict.fromkeys(remarks))
