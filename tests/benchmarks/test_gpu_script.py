"""benchmarks/gpu without a GPU: a rehearsal in an environment that holds only what the borrowed machine has."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from msgspec.structs import replace
from packaging.requirements import Requirement

from benchmarks.common.results import ROOT, read_results
from benchmarks.common.rig import Rig
from benchmarks.gpu import parity, server
from benchmarks.gpu import run as gpu
from benchmarks.gpu.device import check_provider
from prelunet.evaluator.contract import golden_image

# Of the machine with the GPU; what they need is there too.
PACKAGES = ("torch", "onnx", "onnxruntime", "numpy", "pillow", "msgspec")


def _with_requirements(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the distributions and their own requirements, without extras."""
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield name
        parsed = [Requirement(text) for text in required]
        waiting += [one.name for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkout; its folder `bare` holds links to the six packages and what they need, and nothing else."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("src", "evaluator", "export", "training", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True,
                        ignore=shutil.ignore_patterns("results"))  # fmt: skip
    bare = folder / "bare"
    for name in _with_requirements(PACKAGES):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            parts = file.parts[:2] if file.parts[0] == "google" else file.parts[:1]  # a package of several
            link = bare.joinpath(*parts)
            if parts[0] not in {"..", "__pycache__"} and not link.exists():
                link.parent.mkdir(exist_ok=True, parents=True)
                link.symlink_to(Path(str(distribution.locate_file(Path(*parts)))))
    assert not [name for name in ("typer", "rich", "grpc", "safetensors", "scipy", "ray") if (bare / name).exists()]
    return folder


def test_all_parts_run_from_a_checkout_with_only_the_six_packages(checkout: Path) -> None:
    # -S: no site-packages; one thread, as the cores are shared
    command = [sys.executable, "-S", "-m", "benchmarks.gpu.run", "--device", "cpu", "--tiny"]
    command += ["--output", str(checkout / "gpu.json"), "--files", str(checkout / "files")]
    environment = {**os.environ, "PYTHONPATH": "src:bare:.", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=checkout, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.startswith(f"onnxruntime.package_name {onnxruntime.package_name}, providers [")
    data = read_results(checkout / "gpu.json")
    (run,) = data["runs"]
    assert (run["tiny"], run["device"]) == (True, "cpu")
    assert {"torch", "cuda", "cudnn", "onnxruntime", "onnx", "numpy", "python"} <= set(run["versions"])
    measured = {
        case["settings"]["what"] for case in data["cases"] if not case["result"].keys() & {"error", "not_available"}
    }
    expected = {"parity", "views", "torch pairs", "torch groups", "changes of shape", "jpegs", "training", "fused"}
    assert measured == expected  # `server` needs packages that the machine lacks
    assert all(case["result"].get("passed", True) for case in data["cases"])  # parity with the float64 oracle


def test_the_server_is_measured_where_its_packages_are(tmp_path: Path) -> None:
    results = [(case.settings["clients"], case.work()) for case in server.cases(Rig("cpu", tiny=True, files=tmp_path))]
    assert [(result["calls"], result["failed"]) for _, result in results] == [(clients, 0) for clients, _ in results]
    assert {clients for clients, _ in results} == {16, 64}


class WithWrongScores:
    """A session whose mean scores are wrong by `error`, while its windows are right."""

    def __init__(self, session: Any, error: float) -> None:
        self.session, self.error = session, error
        self.contract, self.circumstances = session.contract, session.circumstances

    def run(self, images: np.ndarray, sizes: np.ndarray) -> Any:
        outputs = self.session.run(images, sizes)
        return replace(outputs, scores=outputs.scores + np.float32(self.error))


@pytest.mark.parametrize("fault", ["no fault", "two windows swapped", "mean scores", "logits"])
def test_parity_detects_a_deviation_from_the_oracle(tmp_path: Path, fault: str) -> None:
    rig = Rig("cpu", tiny=True, files=tmp_path)
    images = [golden_image(rig.px(height), rig.px(width)) for height, width in ((231, 301), (256, 341))]
    oracle = parity.oracle_windows(rig, "E", images)
    session: Any = rig.session("E", "fp32")
    scores, logits = oracle[1]
    if fault == "two windows swapped":
        scores[0, [0, -1]] = scores[0, [-1, 0]]  # which leaves the mean as it is
    elif fault == "mean scores":
        session = WithWrongScores(session, 1e-4)
    elif fault == "logits":
        logits *= 1.001
    assert parity.compare(session, images, oracle)["passed"] == (fault == "no fault")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available")
def test_cuda_is_refused_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--device cuda: unavailable: torch .* finds no GPU"):
        gpu.main(["--output", str(tmp_path / "gpu.json"), "--files", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="CUDA is available")
def test_an_onnxruntime_without_cuda_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--device cuda: unavailable: .* has no CUDA support"):
        check_provider(Rig("cuda", tiny=True, files=tmp_path))


def test_the_plan_describes_every_part_and_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--plan", "--output", str(tmp_path / "gpu.json"), "--files", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line[0] != " "] == [f"{part}:" for part in gpu.PARTS]
    assert not list(tmp_path.iterdir())
