"""Training in several processes, started as torchrun starts them: the same net, signals, a killed process."""

import json
import os
import re
import subprocess
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.run import get_args_parser

from prelunet.evaluator.cli import run
from prelunet.evaluator.files import sha256_of
from prelunet.training.net.checkpoints import read_checkpoint
from tests.training.distributed.gloo import Programs
from tests.training.training_folders import RECIPE, lines_of, write_recipe


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    recipe = replace(RECIPE, steps=40, evaluate_every=20, save_every=10, rate_drops=())
    return write_recipe(tmp_path / "small.toml", recipe)


def arguments_for(data: Path, recipe: Path, folder: Path, *more: str) -> list[str]:
    options = ["--recipe", str(recipe), "--data", str(data), "--out", str(folder), "--device", "cpu"]
    return ["train", *options, "--no-tensorboard", *more]


@pytest.mark.parametrize("kind", ["ddp", "hybrid"])
def test_two_processes_train_the_same_net_as_one(data: Path, tmp_path: Path, recipe_file: Path, kind: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(arguments_for(data, recipe_file, one)) == 0
    results = Programs(tmp_path, *[arguments_for(data, recipe_file, two, "--parallel", kind)] * 2).results(120)
    assert [result.code for result in results] == [0, 0], results
    expected, found = read_checkpoint(one / "last.safetensors"), read_checkpoint(two / "last.safetensors")
    for name, tensor in expected.tensors.items():
        # Float32 sums in another order, accumulated over 40 steps
        np.testing.assert_allclose(found.tensors[name], tensor, rtol=0, atol=1e-4 * np.abs(tensor).max(), err_msg=name)
    evaluations = [[line for line in lines_of(folder) if "top1_error" in line] for folder in (one, two)]
    # The loss is rounded to six decimals after sums in another order.
    losses = [[line.pop("val_loss") for line in lines] for lines in evaluations]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert evaluations[1] == evaluations[0]
    assert [environment["processes"] for environment in (found.provenance or {})["environments"]] == [2]
    assert results[1].out == ""  # only the first process reports
    assert "top-1 error" in results[0].out


def test_sigterm_to_one_process_stops_both_after_the_same_step_and_a_single_process_resumes(
    data: Path, tmp_path: Path, recipe_file: Path
) -> None:
    folder, uninterrupted = tmp_path / "run", tmp_path / "uninterrupted"
    programs = Programs(tmp_path, *[arguments_for(data, recipe_file, folder, "--steps", "4000")] * 2)
    wait_for_step(folder, 20, programs)
    programs.processes[1].terminate()
    first, second = programs.results(60)
    assert (first.code, second.code) == (4, 4), (first, second)
    assert "interrupted after step" in first.err
    assert "interrupted" not in second.err  # only the first process reports it
    assert "prelunet:" not in second.err
    stopped = torch.load(folder / "state.pt", weights_only=True)["step"]
    assert run(arguments_for(data, recipe_file, uninterrupted, "--steps", str(stopped + 3))) == 0
    change_length(folder, stopped + 3)
    assert run(arguments_for(data, recipe_file, folder, "--steps", str(stopped + 3))) == 0
    expected = read_checkpoint(uninterrupted / "last.safetensors").tensors
    for name, tensor in read_checkpoint(folder / "last.safetensors").tensors.items():
        # Rounding errors grow over hundreds of steps; without its momentum the net would differ far more
        limit = 0.02 * np.abs(expected[name]).max()
        np.testing.assert_allclose(tensor, expected[name], rtol=0, atol=limit, err_msg=name)


def test_when_a_process_is_killed_the_other_exits_with_advice_and_a_state_to_resume_from(
    data: Path, tmp_path: Path, recipe_file: Path
) -> None:
    folder = tmp_path / "run"
    programs = Programs(tmp_path, *[arguments_for(data, recipe_file, folder, "--steps", "4000")] * 2)
    wait_for_step(folder, 20, programs)
    programs.processes[1].kill()
    first, _ = programs.results(60)
    assert first.code == 5, first
    assert "a process of this run has died" in first.err
    step = torch.load(folder / "state.pt", weights_only=True)["step"]
    assert step >= 20
    assert step % 10 == 0  # save_every
    read_checkpoint(folder / "last.safetensors")


def wait_for_step(folder: Path, step: int, programs: Programs) -> None:
    """Wait until a step has been logged."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        assert all(process.is_alive() for process in programs.processes), programs.results(0)
        lines = lines_of(folder) if (folder / "metrics.jsonl").exists() else []
        if lines and lines[-1]["step"] > step:
            return
        time.sleep(0.05)
    pytest.fail("the processes did not reach the step")


def change_length(folder: Path, steps: int) -> None:
    """Write another number of steps into a run's description; its rate has not dropped yet."""
    path = folder / "training.json"
    description = json.loads(path.read_text())
    assert description["recipe"]["steps"] == 4000
    description["recipe"]["steps"] = steps
    path.write_text(json.dumps(description))


def test_processes_started_with_different_commands_do_not_train(data: Path, tmp_path: Path, recipe_file: Path) -> None:
    arguments = arguments_for(data, recipe_file, tmp_path / "run")
    results = Programs(tmp_path, arguments, [*arguments, "--rate", "0.5"]).results(60)
    assert [result.code for result in results] == [2, 2], results
    assert all("recipe.rate: 0.003 in process 0, 0.5 in process 1" in result.err for result in results)
    assert not (tmp_path / "run").exists()


def test_more_processes_than_rows_are_refused(data: Path, tmp_path: Path, recipe_file: Path) -> None:
    arguments = arguments_for(data, recipe_file, tmp_path / "run", "--batch", "1")
    results = Programs(tmp_path, arguments, arguments).results(60)
    assert 2 in [result.code for result in results], results
    assert any("a batch of 1 cannot be split into 2 parts" in result.err for result in results)


def test_two_processes_fine_tune_under_torchrun(data: Path, tmp_path: Path, recipe_file: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(arguments_for(data, recipe_file, first, "--steps", "1")) == 0
    start = first / "last.safetensors"
    arguments = arguments_for(data, recipe_file, second, "--steps", "1", "--from", str(start))
    scripts = sysconfig.get_path("scripts")
    environment = {
        **os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
    }  # fmt: skip
    command = [f"{scripts}/torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", "prelunet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "training on cpu, fp32, 2 processes, ddp" in done.stderr
    assert done.stdout.count("top-1 error") == 1
    assert json.loads((second / "training.json").read_text())["start"] == sha256_of(start)


def test_torchrun_passes_on_every_option_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--help"]) == 0
    options = re.findall(r"(?:^ | /|,) (--?[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert {"--from", "--rate", "--fresh", "--no-tensorboard", "-o", "--output"} < set(options)
    for option in options:  # it also parses abbreviations of its own options after the program's name
        parsed = get_args_parser().parse_args(["--no-python", "prelunet", "train", option])
        assert parsed.training_script_args == ["train", option]
