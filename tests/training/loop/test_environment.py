"""Deterministic training, and what a checkpoint records about where its weights come from."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prelunet.evaluator.cli import run as run_program
from prelunet.evaluator.errors import Interrupted, RunFolderError, UsageError
from prelunet.evaluator.files import sha256_of
from prelunet.training.data.splits import open_splits
from prelunet.training.loop.environment import torch_settings
from prelunet.training.loop.execution import Execution
from prelunet.training.loop.train import train
from prelunet.training.loop.trainer import Trainer
from prelunet.training.net.checkpoints import read_checkpoint
from prelunet.training.recipe import Recipe
from tests.training.training_folders import RECIPE, write_recipe

DETERMINISTIC = Execution(deterministic=True)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def settings() -> tuple[Any, ...]:
    """Return torch's settings that decide whether and how exactly a run repeats."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    return torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32


def provenance(checkpoint: Path) -> dict[str, Any]:
    found = read_checkpoint(checkpoint).provenance
    assert found is not None
    return dict(found)


def stop_after(steps: int, data: Path, folder: Path, execution: Execution = Execution(), **options: Any) -> None:
    """Train with RECIPE and stop after some steps, as Ctrl-C does."""
    original = Trainer.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", lambda self, batch: original(self, batch) or self.progress.step == steps)
        with pytest.raises(Interrupted):
            train(RECIPE, data, folder, execution=execution, **options)


# Settings


@pytest.mark.parametrize(
    ("precision", "execution", "expected"),
    [
        ("fp32", Execution(), (False, False, False, False)),
        ("bf16", DETERMINISTIC, (True, False, False, False)),
        ("tf32", Execution(cudnn_benchmark=True), (False, True, True, True)),
    ],
)
def test_the_settings_of_a_run_apply_to_it_alone(precision: Any, execution: Execution, expected: Any) -> None:
    before = settings()
    assert before[2], "torch's own default, which a run in fp32 must not keep"
    with torch_settings(precision, execution):
        assert settings() == expected
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if execution.deterministic else None)
    assert settings() == before


def test_a_workspace_of_cublas_that_does_not_repeat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UsageError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0 .* contradicts --deterministic"):
        torch_settings("fp32", DETERMINISTIC).__enter__()
    with torch_settings("fp32", Execution()):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"


def test_timed_algorithms_contradict_deterministic_ones(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = write_recipe(tmp_path / "r.toml", RECIPE), tmp_path / "run"
    words = ["train", "--recipe", str(recipe), "--data", str(data), "--out", str(out)]
    assert run_program([*words, "--deterministic", "--cudnn-benchmark"]) == 2
    assert "--deterministic and --cudnn-benchmark exclude each other" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_tf32_without_a_gpu_is_refused_before_anything_is_written(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tf32 needs a GPU .* runs on cpu\. Use --precision fp32"):
        train(replace(RECIPE, precision="tf32"), data, tmp_path / "run", execution=Execution(device="cpu"))
    assert not (tmp_path / "run").exists()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of the operations that torch executes, of the backward pass too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_no_operation_of_a_step_lacks_a_deterministic_kernel_on_cuda(data: Path, tmp_path: Path) -> None:
    # From the documentation of torch.use_deterministic_algorithms; nll_loss of (N, K) logits is deterministic.
    refused = {"adaptive_max_pool2d_backward", "_adaptive_avg_pool2d_backward", "nll_loss2d_forward", "histc"}
    refused |= {"bincount", "put_", "cumsum", "median", "scatter_reduce", "grid_sampler_2d", "index_put_"}
    operations = _Operations()
    (tmp_path / "run").mkdir()
    trainer = Trainer(replace(RECIPE, steps=1), open_splits(data), tmp_path / "run", execution=Execution(diagnose=True))
    with operations:
        trainer.run()
    assert {"convolution_backward", "gather", "adaptive_max_pool2d"} <= operations.names
    assert not operations.names & refused


# What a checkpoint records


def test_a_checkpoint_records_the_environment_of_its_steps(data: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    train(replace(RECIPE, precision="bf16"), data, tmp_path / "run", execution=DETERMINISTIC)
    found = provenance(tmp_path / "run/last.safetensors")
    (environment,) = found["environments"]
    assert found["parent_sha256"] is None
    assert environment["versions"].keys() == {"numpy", "pillow", "prelunet", "python", "torch"}
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["device"]
    assert {key: value for key, value in environment.items() if key not in {"versions", "device"}} == {
        "from_step": 0,
        "processes": 1,
        "threads": 1,
        "precision": "bf16",
        "deterministic": True,
        "cudnn_benchmark": False,
    }


def test_a_run_resumed_with_other_threads_prints_the_change_and_records_both(data: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder, messages = tmp_path / "run", list[str]()
    stop_after(7, data, folder)
    assert [entry["threads"] for entry in provenance(folder / "last.safetensors")["environments"]] == [1]
    torch.set_num_threads(2)
    train(RECIPE, data, folder, report=messages.append)
    (line,) = [text for text in messages if "environment" in text]
    assert "(threads: 1 before, 2 now): the net may differ" in line
    entries = provenance(folder / "last.safetensors")["environments"]
    assert [(entry["from_step"], entry["threads"]) for entry in entries] == [(0, 1), (7, 2)]


def test_deterministic_added_on_a_cpu_is_recorded_but_not_reported_as_a_change(data: Path, tmp_path: Path) -> None:
    folder, messages = tmp_path / "run", list[str]()
    stop_after(7, data, folder, Execution(device="cpu"))
    train(RECIPE, data, folder, execution=Execution(device="cpu", deterministic=True), report=messages.append)
    assert not any("environment" in text for text in messages)
    entries = provenance(folder / "last.safetensors")["environments"]
    assert [(entry["from_step"], entry["deterministic"]) for entry in entries] == [(0, False), (7, True)]


def test_an_environment_in_which_no_step_was_completed_is_not_recorded(data: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = tmp_path / "run"
    stop_after(7, data, folder)
    before = (folder / "last.safetensors").read_bytes()
    torch.set_num_threads(2)
    Trainer(replace(RECIPE, evaluation_scale=14), open_splits(data), folder).save()
    assert (folder / "last.safetensors").read_bytes() == before
    torch.set_num_threads(1)
    train(RECIPE, data, folder)
    (entry,) = provenance(folder / "last.safetensors")["environments"]
    assert (entry["from_step"], entry["threads"]) == (0, 1)


def test_deterministic_training_gives_the_same_net_on_a_cpu_interrupted_or_not(data: Path, tmp_path: Path) -> None:
    train(RECIPE, data, tmp_path / "plain")
    train(RECIPE, data, tmp_path / "deterministic", execution=DETERMINISTIC)
    stop_after(7, data, tmp_path / "resumed", DETERMINISTIC)
    train(RECIPE, data, tmp_path / "resumed", execution=DETERMINISTIC)
    plain, resumed = (read_checkpoint(tmp_path / name / "last.safetensors").tensors for name in ("plain", "resumed"))
    for name, tensor in plain.items():
        np.testing.assert_array_equal(resumed[name], tensor, err_msg=name)
    files = [tmp_path / name / "last.safetensors" for name in ("deterministic", "resumed")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_checkpoint_records_its_parent_also_when_the_run_is_resumed(data: Path, tmp_path: Path) -> None:
    parent = train(replace(RECIPE, steps=1), data, tmp_path / "parent").checkpoint
    stop_after(7, data, tmp_path / "run", start=parent)
    train(RECIPE, data, tmp_path / "run", start=parent)
    assert provenance(tmp_path / "run/last.safetensors")["parent_sha256"] == sha256_of(parent)


@pytest.mark.parametrize(
    ("recipe", "parent", "difference"),
    [
        (replace(RECIPE, precision="bf16"), "parent", r"recipe\.precision: fp32 in the folder, bf16 now"),
        (RECIPE, "other", "--from: [0-9a-f]{64} in the folder, [0-9a-f]{64} now"),
        (RECIPE, None, r"--from: [0-9a-f]{64} in the folder, none now"),
    ],
)
def test_resuming_with_another_precision_or_parent_is_refused(
    data: Path, tmp_path: Path, recipe: Recipe, parent: str | None, difference: str
) -> None:
    parents = {
        name: train(replace(RECIPE, steps=1, seed=seed), data, tmp_path / name).checkpoint
        for seed, name in enumerate(("parent", "other"))
    }
    stop_after(7, data, tmp_path / "run", start=parents["parent"])
    with pytest.raises(RunFolderError, match=difference):
        train(recipe, data, tmp_path / "run", start=parent and parents[parent])  # type: ignore[arg-type]
