"""After kill -9 at any moment, the same command resumes the run, which ends in the same bytes."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.conftest import ExportedNet
from tests.helpers.child_processes import ForkServer, fork_server
from tests.helpers.fakes import fake_contract
from tests.validation.shared_data import contents, write_images

IMAGES = 150  # two chunks and part of a third
COPIES = 9  # of the images in a long run, which has 22 chunks
KILLS = 6
KILLS_OF_THE_PROGRAM = 2
PRELUNET = [sys.executable, "-c", "from prelunet.evaluator.cli import main; main()"]


@pytest.fixture(scope="module")
def children() -> Iterator[ForkServer]:
    with fork_server() as started:
        yield started


def lay_out(folder: Path, wnids: list[str]) -> Path:
    """Write 150 small images into the folders of five classes; the last one is damaged."""
    write_images(folder, [wnids[index] for index in (0, 1, 2, 3, 5)], IMAGES)
    (folder / wnids[5] / "149.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("data") / "val", [entry.wnid for entry in fake_contract().classes])


@pytest.fixture(scope="module")
def whole(children: ForkServer, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, bytes]]:
    """Return the bytes of uninterrupted runs, by the number of copies of the images."""
    folder, runs = tmp_path_factory.mktemp("whole"), {}
    for copies in (1, COPIES):
        children.begin(data=data, folder=folder / str(copies), copies=copies)
        assert children.end() == 0
        runs[copies] = contents(folder / str(copies))
    return runs


def check_log(folder: Path, torn: int = 0) -> None:
    """Check that no chunk was done again after it was written, and that each beginning tells where it stands.

    torn: how many lines may be unreadable, because a kill cut them in two.
    """
    done = 0
    for line in (folder / "log.jsonl").read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            torn -= 1
            assert torn >= 0, line
            continue
        if entry["event"] == "chunk":
            assert entry["index"] * 64 in {done, done + 64}, "a chunk was done twice"  # one may be written, not logged
            done = (entry["index"] + 1) * 64
        else:
            assert entry["event"] == ("resume" if entry["done"] else "start")
            assert entry["done"] >= done
            done = entry["done"]  # includes what was written and not logged before a kill


def test_killed_at_random_moments_a_run_resumes_and_ends_in_the_same_bytes(
    children: ForkServer, data: Path, tmp_path: Path, whole: dict[int, dict[str, bytes]]
) -> None:
    moments = random.Random(7)
    runs = (tmp_path / str(number) for number in count())
    folder, kills = next(runs), 0
    while kills < KILLS:
        code = children.kill_after(moments.uniform(0, 0.3), data=data, folder=folder, copies=COPIES)
        if code == 0:  # it finished first; kill another one
            assert contents(folder) == whole[COPIES]
            check_log(folder)
            folder = next(runs)
        else:
            assert code == -signal.SIGKILL
            kills += 1
    children.begin(data=data, folder=folder, copies=COPIES)
    assert children.end() == 0
    assert contents(folder) == whole[COPIES]
    check_log(folder)


def test_killed_at_any_step_of_writing_and_again_while_resuming_a_run_ends_in_the_same_bytes(
    children: ForkServer, data: Path, tmp_path: Path, whole: dict[int, dict[str, bytes]]
) -> None:
    again = random.Random(11)
    for step in count(1):
        order = {"data": data, "folder": tmp_path / str(step), "copies": 1}
        if children.kill_at_step(step, **order) == 0:
            break
        children.kill_at_step(again.randint(1, 12), **order)
        assert children.kill_at_step(0, **order) == 0
        assert contents(tmp_path / str(step)) == whole[1], f"killed at step {step}"
        check_log(tmp_path / str(step), torn=2)
    assert step > 3 * 4 + 4, "three chunks are twelve steps, and more come before"


def test_killed_while_an_old_run_is_deleted_the_same_command_starts_over(
    children: ForkServer, data: Path, tmp_path: Path, whole: dict[int, dict[str, bytes]]
) -> None:
    folder = tmp_path / "run"
    order = {"data": data, "folder": folder, "copies": 1}
    for step in range(1, 12):  # until the new run has its first lines
        children.kill_at_step(0, **order)
        (folder / "report").mkdir(exist_ok=True)
        (folder / "report" / "report.json").write_text("of the old run")
        (folder / "run.json").write_text((folder / "run.json").read_text().replace('"m.onnx"', '"old.onnx"'))
        assert children.kill_at_step(step, **order, fresh=True) == -signal.SIGKILL
        assert children.kill_at_step(0, **order, fresh=step % 2 == 0) == 0, f"killed at step {step}"
        found = contents(folder)
        assert found.pop("run.json").replace(b"old.onnx", b"m.onnx") == whole[1]["run.json"]
        assert found.items() <= whole[1].items(), f"killed at step {step}"
        assert (folder / "report" / "report.json").exists() == (step == 1)


def test_killed_while_heat_maps_are_stored_the_same_command_ends_in_the_same_bytes(
    children: ForkServer, data: Path, tmp_path: Path
) -> None:
    order = {"data": data, "folder": tmp_path / "run", "copies": 1}
    assert children.kill_at_step(0, **order, heatmaps=0) == 0
    run = contents(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    order_of_all = {**order, "folder": tmp_path / "whole"}
    assert children.kill_at_step(0, **order_of_all, heatmaps=4) == 0
    whole = (tmp_path / "whole" / "heatmaps.jsonl").read_bytes()
    assert whole.count(b"\n") == 4
    for step in count(1):
        (tmp_path / "run" / "heatmaps.jsonl").unlink(missing_ok=True)
        if children.kill_at_step(step, **order, heatmaps=4) == 0:
            break
        children.kill_at_step(1 + step % 2, **order, heatmaps=4)  # and again, while it resumes
        assert children.kill_at_step(0, **order, heatmaps=4) == 0
        assert (tmp_path / "run" / "heatmaps.jsonl").read_bytes() == whole, f"killed at step {step}"
        assert contents(tmp_path / "run") == run
    assert step == 1 + 4 * 2 + 1, "a damaged file is deleted; a line is written and synchronized"


def test_the_program_killed_at_random_moments_resumes_and_ends_in_the_same_bytes(
    exported: dict[str, ExportedNet], tmp_path: Path
) -> None:
    model = exported["demo-image"]
    data = lay_out(tmp_path / "val", [entry.wnid for entry in model.session.contract.classes])
    command = [*PRELUNET, "validate", "--model", str(model.path), "--data", str(data), "--protocol", "dense-30"]
    begun = time.monotonic()
    subprocess.run([*command, "--run", str(tmp_path / "whole")], check=True, capture_output=True, timeout=60)
    life = time.monotonic() - begun
    whole = contents(tmp_path / "whole")
    moments, kills = random.Random(13), 0
    runs = (tmp_path / str(number) for number in count())
    folder = next(runs)
    while kills < KILLS_OF_THE_PROGRAM:
        process = subprocess.Popen(
            [*command, "--run", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(moments.uniform(0, life))
        process.kill()
        if process.wait() == 0:
            assert contents(folder) == whole
            folder = next(runs)  # it finished first; kill another one
        else:
            assert process.returncode == -signal.SIGKILL
            kills += 1
    last = subprocess.run([*command, "--run", str(folder)], check=True, capture_output=True, text=True, timeout=60)
    assert "149 of 150 images" in last.stdout
    assert contents(folder) == whole
