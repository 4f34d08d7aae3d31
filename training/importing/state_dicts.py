"""State dicts of others: the tensors in a torch file or a `.safetensors` file, with the names that a net gave them.

No code in a file is ever run: torch's own reader is asked for weights only, and refuses whatever else a pickle holds.
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

from prelunet.evaluator.errors import CheckpointError, UsageError
from prelunet.evaluator.files import require_regular_file
from prelunet.training.net.checkpoints import PREFIX

_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")  # keys under which training scripts keep the net
_MAX_NESTING = 4  # such keys inside each other; a pickle may hold itself
_SAVE = "torch.save(net.state_dict(), FILE)"


@dataclass(frozen=True)
class StateDict:
    """The tensors of a file, of any type and shape.

    ordered: whether they stand in the order in which the net registered them; remarks: what was done to reach them.
    """

    tensors: Mapping[str, Tensor]
    ordered: bool
    remarks: tuple[str, ...] = ()


def read_state_dict(path: Path) -> StateDict:
    """Read a file of torch.save or safetensors.

    The state dict may lie under `state_dict`, `model_state_dict`, `model` or `net`; the prefixes of torch.compile
    (`_orig_mod.`) and of DistributedDataParallel (`module.`) are taken off the names. Raises CheckpointError for a file
    that is damaged, of another kind, a checkpoint of ours, or one that only code could read; UsageError for one that
    cannot be opened.
    """
    require_regular_file(path)
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Give the path of a file that is there") from error
    remarks: tuple[str, ...] = ()
    if head[8:] == b"{":  # 8 bytes of length, then a header in JSON
        tensors, ordered = _read_safetensors(path), False  # its usual writer sorts by type and name
    elif head.startswith((b"PK\x03\x04", b"\x80")):  # torch's archive, and the bare pickle of torch before 1.6
        tensors, remarks = _state_dict_in(path, _load(path))
        ordered = True
    else:
        raise CheckpointError(
            f"{path}: neither a file of torch.save (.pt, .pth) nor a .safetensors file. Write one of them with "
            f"{_SAVE}; a net as ONNX is for: prelunet adopt"
        )
    bare, said = _without_prefixes(path, tensors)
    return StateDict(bare, ordered, (*remarks, *said))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if f"{PREFIX}version" in (file.metadata() or {}):
                raise CheckpointError(
                    f"{path}: a checkpoint of prelunet already, so there is nothing to import. `prelunet inspect` "
                    "tells what it is, `prelunet export` takes it"
                )
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _load(path: Path) -> Any:
    """Return what torch.save stored; tensors and plain containers of them alone."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how old the file is, and about archives that we refuse
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on damaged bytes torch raises far more than its own classes
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which seeking before the beginning gives
            raise
        if needs := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise CheckpointError(
                f"{path}: holds more than tensors: {needs[1]}. Reading that would run code from the file; none of it "
                f"was run. Where the net comes from, write its tensors alone: {_SAVE}"
            ) from error
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path}: a TorchScript program, not a state dict. Write its tensors alone: "
                "torch.save(torch.jit.load(FILE).state_dict(), OTHER)"
            ) from error
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    why = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0][:200]  # torch goes on with advice
    return CheckpointError(
        f"{path}: damaged, or cut short as after an interrupted copy or download ({path.stat().st_size} bytes; {why}). "
        f"Copy it again, or write it again with {_SAVE}"
    )


def _state_dict_in(path: Path, loaded: Any) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the state dict in what a file holds, and under which keys it was found."""
    inside: list[str] = []
    while isinstance(loaded, Mapping) and len(inside) < _MAX_NESTING:
        keys = [key for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)]
        if not keys:
            break
        if len(keys) > 1:
            raise CheckpointError(
                f"{path}: holds several state dicts: {', '.join(keys)}. Write the one that you mean alone: "
                f"torch.save(torch.load(FILE)['{keys[0]}'], OTHER)"
            )
        inside.append(keys[0])
        loaded = loaded[keys[0]]
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        shown = ", ".join(repr(key)[:60] for key in list(loaded)[:8]) if isinstance(loaded, Mapping) else ""
        what = f"only the keys {shown}" if shown else f"only a {type(loaded).__name__}"
        raise CheckpointError(
            f"{path}: no state dict in it, {what}; one was looked for there and under {', '.join(_WRAPPERS)}. "
            f"Write one with {_SAVE}"
        )
    strange = [  # a nested tensor has no shape
        repr(name)[:60]
        for name, value in loaded.items()
        if not (isinstance(name, str) and isinstance(value, Tensor)) or value.is_nested
    ]
    if strange:
        raise CheckpointError(
            f"{path}: beside the tensors there are other things: {', '.join(strange[:8])}. "
            f"Write the tensors alone: {_SAVE}"
        )
    return dict(loaded), (f"the state dict was found under '{'.'.join(inside)}'",) if inside else ()


def _without_prefixes(path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Take off what torch.compile and DistributedDataParallel put before the names of a net."""
    said = []
    names = {name: ".".join(part for part in name.split(".") if part != "_orig_mod") for name in tensors}
    if list(names.values()) != list(tensors):
        said.append("'_orig_mod.' of torch.compile was taken off the names")
    while names and all(name.startswith("module.") for name in names.values()):
        names = {name: bare.removeprefix("module.") for name, bare in names.items()}
        said.append("'module.' of DistributedDataParallel was taken off the names")
    bare = {names[name]: tensor for name, tensor in tensors.items()}
    if len(bare) < len(tensors):
        raise CheckpointError(
            f"{path}: holds tensors twice, with and without '_orig_mod.'. Write one net alone: {_SAVE}"
        )
    return bare, tuple(dict.fromkeys(said))
