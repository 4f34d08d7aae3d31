"""State dicts are found in files of training scripts; files that need code to be read are refused."""

import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from prelunet.evaluator.errors import CheckpointError, UsageError
from prelunet.training.net.checkpoints import write_checkpoint
from tests.export.foreign.foreign_torch import our_names, tiny_import


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "net.pt"


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize("keys", [[], ["state_dict"], ["model"], ["net"], ["model", "state_dict"]])
def test_a_state_dict_is_found_where_training_scripts_put_it(file: Path, keys: list[str], old_format: bool) -> None:
    inside: Any = our_names()
    for key in reversed(keys):
        inside = {key: inside, "epoch": 3, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}
    torch.save(inside, file, _use_new_zipfile_serialization=not old_format)
    imported = tiny_import(file)
    assert imported.remarks == ((f"the state dict was found under '{'.'.join(keys)}'",) if keys else ())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_the_prefixes_of_ddp_and_compile_are_removed_with_a_remark(file: Path, prefix: str) -> None:
    torch.save({prefix + name: tensor for name, tensor in our_names().items()}, file)
    imported = tiny_import(file)
    assert imported.method == "by name"
    remarks = " ".join(imported.remarks)
    assert ("DistributedDataParallel" in remarks, "torch.compile" in remarks) == (
        "module." in prefix,
        "_orig" in prefix,
    )


def test_a_submodule_named_module_keeps_its_name(file: Path) -> None:
    torch.save({f"module.{name}" if "fc" in name else name: tensor for name, tensor in our_names().items()}, file)
    with pytest.raises(CheckpointError, match=r"unexpected module\.fc3\.bias \[3\]"):
        tiny_import(file)


def test_a_safetensors_file_is_read_by_name(tmp_path: Path) -> None:
    path = tmp_path / "net.bin"  # the content decides, not the name
    safetensors.torch.save_file(our_names(), path, {"format": "pt"})
    found = tiny_import(path)
    assert found.method == "by name"
    np.testing.assert_array_equal(found.checkpoint.tensors["fc1.weight"], our_names()["fc1.weight"].numpy())


@dataclass
class Evil:
    """An object whose pickle creates a folder when it is unpickled."""

    target: Path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("old_format", [False, True])
def test_code_in_a_pickle_is_refused_and_never_run(file: Path, old_format: bool) -> None:
    target = file.with_name("pwned")
    pickle.loads(pickle.dumps(Evil(target)))  # plain unpickling runs it
    target.rmdir()
    torch.save({**our_names(), "extra": Evil(target)}, file, _use_new_zipfile_serialization=not old_format)
    with pytest.raises(CheckpointError, match=r"(posix|nt|os)\.mkdir.*nothing was run.*torch\.save\(net\.state_dict"):
        tiny_import(file)
    assert not target.exists()


def test_a_pickled_module_is_refused_with_advice(file: Path) -> None:
    torch.save(nn.Linear(2, 3), file)
    with pytest.raises(CheckpointError, match=r"more than tensors: torch\.nn\.modules\.linear\.Linear\."):
        tiny_import(file)


def test_a_torchscript_program_is_refused(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:  # recognized by constants.pkl; torch.jit takes seconds to load
        for name, content in (("data.pkl", b"\x80\x02."), ("constants.pkl", b"\x80\x02)."), ("version", b"3\n")):
            archive.writestr(f"net/{name}", content)
    with pytest.raises(CheckpointError, match="a TorchScript program, not a state dict"):
        tiny_import(file)


@pytest.mark.parametrize("kind", ["pt", "old pt", "safetensors"])
def test_a_truncated_or_damaged_file_is_refused(file: Path, kind: str) -> None:
    if kind == "safetensors":
        safetensors.torch.save_file(our_names(), file)
    else:
        torch.save(our_names(), file, _use_new_zipfile_serialization=kind == "pt")
    data = file.read_bytes()
    for length in [0, 1, 8, 9, 40, *range(500, len(data), 1999), len(data) - 1]:
        file.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"net\.pt: (damaged|neither|no state dict)"):
            tiny_import(file)
    damaged = bytearray(data)
    damaged[60:700] = np.random.default_rng(0).bytes(640)
    file.write_bytes(bytes(damaged))
    with pytest.raises(CheckpointError):
        tiny_import(file)


def test_files_of_other_formats_are_refused(file: Path) -> None:
    for content in (b"", b"\x89HDF\r\n\x1a\n" * 9, b"\x08\x09\x12\x07pytorch", b"weights"):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"neither a torch\.save file .* prelunet adopt"):
            tiny_import(file)
    for path in (file.parent, file.with_name("nowhere")):
        with pytest.raises(UsageError, match="cannot be read"):
            tiny_import(path)


def test_a_prelunet_checkpoint_is_not_imported(file: Path) -> None:
    torch.save(our_names(), file)
    write_checkpoint(file.with_name("ours"), tiny_import(file).checkpoint)
    with pytest.raises(CheckpointError, match="already a prelunet checkpoint, so there is nothing to import"):
        tiny_import(file.with_name("ours"))


def test_a_pickle_that_contains_itself_is_refused(file: Path) -> None:
    endless: dict[str, Any] = {}
    endless["model"] = endless
    torch.save(endless, file)
    with pytest.raises(CheckpointError, match=r"no state dict at .*, only the keys 'model'"):
        tiny_import(file)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"weights": {"a": torch.zeros(2)}, "epoch": 3}, "no state dict at .*, only the keys 'weights', 'epoch'"),
        ([torch.zeros(2)], "no state dict at .*, only a list"),
        ({"model": {"a": torch.zeros(2)}, "net": {"a": torch.ones(2)}}, "several state dicts: model, net"),
        ({"a": torch.zeros(2), "epoch": 3, 7: torch.zeros(2)}, "contains more than tensors: 'epoch', 7"),
    ],
)
def test_a_file_without_exactly_one_state_dict_is_refused(file: Path, content: Any, fault: str) -> None:
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=fault):
        tiny_import(file)
