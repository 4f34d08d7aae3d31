"""Training in several processes, started as torchrun starts them: the same net, signals, a killed process."""

import json
import os
import re
import signal
import subprocess
import sys
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
from tests.training.distributed.gloo import free_port
from tests.training.training_folders import RECIPE, lines_of, make_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"))


WORK = """
import os, sys, time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from prelunet.evaluator.cli import run
sys.exit(run({arguments!r}))
"""


def start_processes(
    size: int, arguments: list[str], port: int, *, extra_of_last: list[str] | None = None
) -> list["subprocess.Popen[str]"]:
    """Start the processes of a run; the last one may have extra arguments."""
    lists = [arguments] * (size - 1) + [arguments + (extra_of_last or [])]
    scripts = [WORK.format(tests=str(Path(__file__).parents[3]), arguments=own) for own in lists]
    base = {
        **os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-c", scripts[rank]], env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    values = replace(RECIPE, steps=40, evaluate_every=20, save_every=10, rate_drops=()).to_json()
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()))
    return path


def arguments_for(data: Path, recipe: Path, folder: Path, *more: str) -> list[str]:
    options = ["--recipe", str(recipe), "--data", str(data), "--out", str(folder), "--device", "cpu"]
    return ["train", *options, "--no-tensorboard", *more]


@pytest.mark.parametrize("kind", ["ddp", "hybrid"])
def test_two_processes_train_the_same_net_as_one(data: Path, tmp_path: Path, recipe_file: Path, kind: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(arguments_for(data, recipe_file, one)) == 0
    processes = start_processes(2, arguments_for(data, recipe_file, two, "--parallel", kind), free_port())
    texts = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    expected, found = read_checkpoint(one / "last.safetensors"), read_checkpoint(two / "last.safetensors")
    for name, tensor in expected.tensors.items():
        # Float32 sums in another order, accumulated over 40 steps
        np.testing.assert_allclose(found.tensors[name], tensor, rtol=0, atol=1e-4 * np.abs(tensor).max(), err_msg=name)
    assert [line for line in lines_of(two) if "top1_error" in line] == [
        line for line in lines_of(one) if "top1_error" in line
    ]
    assert texts[1][0] == ""  # only the first process reports
    assert "top-1 error" in texts[0][0]


def test_sigterm_to_one_process_stops_both_after_the_same_step_and_a_single_process_resumes(
    data: Path, tmp_path: Path, recipe_file: Path
) -> None:
    folder, uninterrupted = tmp_path / "run", tmp_path / "uninterrupted"
    processes = start_processes(2, arguments_for(data, recipe_file, folder, "--steps", "4000"), free_port())
    wait_for_step(folder, 20, processes)
    processes[1].send_signal(signal.SIGTERM)
    texts = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [4, 4], texts
    assert "interrupted after step" in texts[0][1]
    assert "interrupted" not in texts[1][1]  # only the first process reports it
    assert "prelunet:" not in texts[1][1]
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
    processes = start_processes(2, arguments_for(data, recipe_file, folder, "--steps", "4000"), free_port())
    wait_for_step(folder, 20, processes)
    processes[1].kill()
    texts = [process.communicate(timeout=60) for process in processes]
    assert processes[0].returncode == 5, texts
    assert "a process of this run has died" in texts[0][1]
    step = torch.load(folder / "state.pt", weights_only=True)["step"]
    assert step >= 20
    assert step % 10 == 0  # save_every
    read_checkpoint(folder / "last.safetensors")


def wait_for_step(folder: Path, step: int, processes: list["subprocess.Popen[str]"]) -> None:
    """Wait until a step has been logged."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
        if (folder / "metrics.jsonl").exists() and lines_of(folder)[-1]["step"] > step:
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
    processes = start_processes(2, arguments, free_port(), extra_of_last=["--rate", "0.5"])
    texts = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [2, 2], texts
    assert all("recipe.rate: 0.003 in process 0, 0.5 in process 1" in text for _, text in texts)
    assert not (tmp_path / "run").exists()


def test_more_processes_than_rows_are_refused(data: Path, tmp_path: Path, recipe_file: Path) -> None:
    arguments = arguments_for(data, recipe_file, tmp_path / "run", "--batch", "1")
    processes = start_processes(2, arguments, free_port())
    texts = [process.communicate(timeout=60) for process in processes]
    assert 2 in [process.returncode for process in processes]
    assert any("a batch of 1 cannot be split into 2 parts" in text for _, text in texts)


def test_fine_tuning_runs_under_torchrun(data: Path, tmp_path: Path, recipe_file: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(arguments_for(data, recipe_file, first, "--steps", "1")) == 0
    start = first / "last.safetensors"
    arguments = arguments_for(data, recipe_file, second, "--steps", "1", "--from", str(start))
    scripts = sysconfig.get_path("scripts")
    environment = {
        **os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
    }  # fmt: skip
    command = [f"{scripts}/torchrun", "--standalone", "--nproc-per-node", "1", "--no-python", "prelunet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((second / "training.json").read_text())["start"] == sha256_of(start)


def test_torchrun_passes_on_every_option_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--help"]) == 0
    options = re.findall(r"(?:^ | /) (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert {"--from", "--rate", "--fresh", "--no-tensorboard"} < set(options)
    for option in options:  # it also parses abbreviations of its own options after the program's name
        parsed = get_args_parser().parse_args(["--no-python", "prelunet", "train", option])
        assert parsed.training_script_args == ["train", option]
