"""benchmarks/gpu without a GPU: a rehearsal in an environment that holds no more than the borrowed machine's."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from packaging.requirements import Requirement

from benchmarks.common import imagenet_sizes
from benchmarks.common.nets import MEAN
from benchmarks.common.results import ROOT, Results, read_results
from benchmarks.common.rig import Rig, check_provider, digest_of, raw_session
from benchmarks.gpu import parity, sweep
from benchmarks.gpu import run as gpu
from benchmarks.gpu.graphs import with_padded_conv1, with_split_concats
from benchmarks.gpu.table import BEGIN, END, NOT_MEASURED, goals, table, write_into
from prelunet.evaluator.architectures import architecture, multiply_adds
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.engine import load
from prelunet.evaluator.engine.memory import portion_size
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.protocols import build_protocol

PACKAGES = ("torch", "onnx", "onnxruntime", "numpy", "pillow")  # of the machine with the GPU, and what they need
NOW: dict[str, Any] = {
    "device": "cuda",
    "tiny": False,
    "gpu": "a GPU",
    "versions": {"torch": "2"},
    "date": "2026-01-01T00:00:00+00:00",
    "onnxruntime": {"package_name": "onnxruntime-gpu"},
    "first": {"driver_version": "580"},
    "matmul_tflops": {"fp16": 700.0},
    "command": "python -m benchmarks.gpu.run",
    "machine": {"cpu": "a processor"},
}


def _with_what_they_need(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the distributions and their own requirements, extras left out."""
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
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds the five packages and what they need, by links; and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    for name in _with_what_they_need(PACKAGES):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            parts = file.parts[:2] if file.parts[0] == "google" else file.parts[:1]  # a package of several
            link = folder.joinpath(*parts)
            if parts[0] not in {"..", "__pycache__"} and not link.exists():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(Path(str(distribution.locate_file(Path(*parts)))))
    assert not [name for name in ("typer", "rich", "grpc", "safetensors", "scipy", "ray") if (folder / name).exists()]
    return folder


class Rehearsals:
    """The parts, each run at most once, from a copy of the checkout that is not installed anywhere.

    folder: where their results lie; bare: see there.
    """

    def __init__(self, bare: Path, folder: Path) -> None:
        self.folder = folder
        self._bare, self._checkout = bare, folder / "checkout"
        for name in ("src", "evaluator", "export", "training", "benchmarks"):
            left_out = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / name, self._checkout / name, symlinks=True, ignore=left_out)
        self._done: dict[str, subprocess.CompletedProcess[str]] = {}

    def of(self, part: str) -> "subprocess.CompletedProcess[str]":
        """Run a part as a process, unless it was."""
        if part not in self._done:
            # -S: no site-packages; one thread, as the cores are shared
            command = [sys.executable, "-S", "-m", "benchmarks.gpu.run", "--part", part, "--device", "cpu", "--tiny"]
            command += ["--results", str(self.folder), "--files", str(self.folder / "files")]
            environment = {**os.environ, "PYTHONPATH": f"src:{self._bare}", "OMP_NUM_THREADS": "1"}
            self._done[part] = subprocess.run(
                command, env=environment, cwd=self._checkout, capture_output=True, text=True, timeout=250, check=False
            )
        return self._done[part]

    def cases(self, part: str) -> list[dict[str, Any]]:
        """Return the cases of a part."""
        self.of(part)
        found: list[dict[str, Any]] = read_results(self.folder / f"gpu-{part}-tiny.json")["cases"]
        return found


@pytest.fixture(scope="module")
def rehearsals(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Rehearsals:
    return Rehearsals(bare, tmp_path_factory.mktemp("rehearsals"))


@pytest.mark.parametrize("part", gpu.PARTS)
def test_a_part_runs_from_a_checkout_with_the_five_packages_alone(rehearsals: Rehearsals, part: str) -> None:
    done = rehearsals.of(part)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first = done.stdout.splitlines()[0]
    assert first.startswith(f"onnxruntime.package_name {onnxruntime.package_name}, providers [")
    data = read_results(rehearsals.folder / f"gpu-{part}-tiny.json")
    (run,) = data["runs"]
    assert (data["part"], run["tiny"], run["device"]) == (part, True, "cpu")
    assert {"torch", "cuda", "cudnn", "onnxruntime", "onnx", "numpy", "python"} <= set(run["versions"])
    assert len(data["cases"]) >= 5
    assert not [case for case in data["cases"] if "error" in case["result"]]


def test_the_rehearsal_of_parity_holds_every_net_to_its_oracle(rehearsals: Rehearsals) -> None:
    cases = rehearsals.cases("parity")
    kinds = {tuple(case["settings"][key] for key in ("net", "canvas", "precision")) for case in cases}
    assert kinds == {(n, c, p) for n in "ACE" for c in ("ragged", "exact") for p in ("fp16", "fp32")}
    assert all(case["result"]["passed"] for case in cases)
    together = [case["result"]["together_from_alone"] for case in cases if case["settings"]["canvas"] == "ragged"]
    assert max(together) < 1e-6  # sums of other numbers of zeros


class Off:
    """A session whose mean scores are off by that much, while its windows are right."""

    def __init__(self, session: Any, by: float) -> None:
        self.session, self.by = session, by
        self.contract, self.circumstances = session.contract, session.circumstances

    def run(self, images: np.ndarray, sizes: np.ndarray) -> Any:
        outputs = self.session.run(images, sizes)
        return replace(outputs, scores=outputs.scores + np.float32(self.by))


@pytest.mark.parametrize("fault", ["no fault", "two windows swapped", "mean scores", "logits", "another grid"])
def test_parity_sees_what_is_off(tmp_path: Path, fault: str) -> None:
    rig = Rig("cpu", tiny=True, files=tmp_path)
    images = [golden_image(rig.px(height), rig.px(width)) for height, width in ((231, 301), (256, 341))]
    oracle = parity._oracle(rig, "E", images)
    session: Any = rig.session("E", "fp32")
    scores, logits = oracle[1]
    if fault == "two windows swapped":
        scores[0, [0, -1]] = scores[0, [-1, 0]]  # which leaves the mean as it is
    elif fault == "mean scores":
        session = Off(session, 1e-4)
    elif fault == "logits":
        logits *= 1.001
    elif fault == "another grid":
        oracle[1] = (scores[:-1], logits[:-1])
        with pytest.raises(ValueError, match="windows, but the oracle has"):
            parity._compare(session, images, oracle)
        return
    assert parity._compare(session, images, oracle)["passed"] == (fault == "no fault")


def test_rewritten_files_give_the_same_scores(tmp_path: Path) -> None:
    rig = Rig("cpu", tiny=True, files=tmp_path)
    path = rig.model_file("C", "fp32")
    wider, split = with_padded_conv1(path, 8), with_split_concats(path, limit=4)
    longest = max(len(node.input) for node in onnx.load(str(split)).graph.node if node.op_type == "Concat")
    assert longest == 4  # the net has 14 bins
    found = []
    for file in (path, wider, split):
        bound = sweep.BoundSession(rig, raw_session(rig, file))
        found.append(bound.run(bound.upload((2, 33, 41)))[0].numpy())
    # Sums of more zeros are split elsewhere by some processors' kernels: ten layers of float32 roundings, 6e-8 each
    np.testing.assert_allclose(found[1], found[0], rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(found[2], found[0])


class Plans:
    """A stand-in for a session that, as the CUDA provider, takes longer when the shape is not that of the call before.

    It moves the clock itself: a call takes a millisecond for each row of its canvas, and 16 more after a change.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.shape = 0.0, (0, 0, 0)
        monkeypatch.setattr("benchmarks.common.rig.time.perf_counter", lambda: self.now)

    def upload(self, shape: tuple[int, int, int], seed: int = 0) -> tuple[int, int, int]:
        return shape

    def run(self, shape: tuple[int, int, int]) -> None:
        self.now += (shape[1] + 16 * (shape != self.shape)) / 1e3
        self.shape = shape


def test_the_cost_of_a_change_of_shape_is_what_alternating_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sweep._changes_of_shape(Rig("cpu", tiny=False, files=tmp_path), Plans(monkeypatch))  # type: ignore[arg-type]
    heights = [height for height, _ in sweep.SHAPES]
    assert found["repeated_ms"] == pytest.approx(np.mean(heights))
    assert found["switch_2_ms"] == pytest.approx(16)
    assert found["switch_6_ms"] == pytest.approx(16)
    assert found["alternating_2_ms"] == pytest.approx(np.mean(heights[:2]) + 16)


class ByThread:
    """A stand-in for a session that keeps 2 GB for each thread that ever ran it."""

    threads: ClassVar[set[int]] = set()

    def __init__(self, *_: Any) -> None:
        self.threads.clear()

    def upload(self, shape: tuple[int, int, int]) -> None:
        self.live: list[threading.Thread] = []

    def run(self, values: None) -> None:
        self.live.append(threading.current_thread())  # which keeps its name for itself
        self.threads.update(map(id, self.live))


def test_memory_that_each_thread_takes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.sweep.BoundSession", ByThread)
    monkeypatch.setattr("benchmarks.gpu.sweep.raw_session", lambda *_: None)
    monkeypatch.setattr("benchmarks.common.rig.Rig.model_file", lambda *_: None)
    monkeypatch.setattr("benchmarks.common.rig.Rig.used_memory_gb", lambda _: 2.0 * len(ByThread.threads))
    found = sweep._threads(Rig("cpu", tiny=False, files=tmp_path), "A")
    assert (found["runs"], found["same_gb"], found["fresh_gb"]) == (8, 0, 16)


def test_the_rehearsal_of_the_sweep_widens_conv1_without_another_score(rehearsals: Rehearsals) -> None:
    off = [case["result"]["off"] for case in rehearsals.cases("sweep") if case["settings"]["what"] == "conv1"]
    assert len(off) == 3
    assert max(off) < 1e-3  # float16 sums in another order


def test_time_for_the_oracle_is_asked_for_once_a_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.parity._oracle", lambda *_: [])
    monkeypatch.setattr("benchmarks.gpu.parity._compare", lambda *_: {})
    monkeypatch.setattr("benchmarks.common.rig.Rig.session", lambda *_: None)
    asked: dict[str, list[float]] = {}

    class Asked:
        def measure(self, settings: dict[str, str], work: Any, seconds: float) -> None:
            asked.setdefault(settings["net"], []).append(seconds)
            work()

    parity.run(Rig("cpu", tiny=True, files=tmp_path), Asked())  # type: ignore[arg-type]
    longer = parity.CASE_SECONDS + parity.ORACLE_SECONDS
    assert asked == {net: [longer, *[parity.CASE_SECONDS] * 3] for net in "ACE"}


def test_the_rate_of_a_shape_counts_all_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("cpu", tiny=False, files=tmp_path, peaks={"fp16": 500.0})
    found = sweep._rate(rig, Plans(monkeypatch), "A", (8, 250, 330), "fp16")  # type: ignore[arg-type]
    assert found["ms"] == pytest.approx(250)
    assert found["images_per_second"] == pytest.approx(32)
    assert found["tflops"] == pytest.approx(8 * rig.flop("A", [(250, 330)]) / 0.25 / 1e12)
    assert found["share_of_peak"] == pytest.approx(found["tflops"] / 500, abs=1e-4)  # rounded there


def test_the_rehearsal_of_throughput_counts_what_its_views_cost(rehearsals: Rehearsals) -> None:
    cases = rehearsals.cases("throughput")
    assert {case["settings"]["what"] for case in cases} == {"views", "jpegs"}
    chosen = [case for case in cases if case["settings"]["what"] == "views"]
    sizes = imagenet_sizes.draw(4)
    views = [resized_size(*size, scale) for size in sizes for scale in (32, 48, 60) for _mirrored in range(2)]
    flop = sum(2 * multiply_adds(architecture("demo"), *view, 10) for view in views)
    for case in chosen:
        result = case["result"]
        assert case["settings"]["protocol"] == "multi-scale"
        assert result["tflop_per_image"] == pytest.approx(flop / 4 / 1e12)
        assert result["images_per_second"] * result["seconds"] == pytest.approx(4)
        assert result["minutes_for_imagenet"] == pytest.approx(50_000 * result["seconds"] / 4 / 60)
        assert result["padding"] > 0  # a rehearsal lays views on canvases as a GPU would
        assert result["computed_share_of_peak"] > result["share_of_peak"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here a GPU would come up")
def test_a_part_for_cuda_is_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--device cuda: unavailable: torch .* finds no GPU"):
        gpu.main(["--part", "training", "--results", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="here it may come up")
def test_an_onnxruntime_without_cuda_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--device cuda: unavailable: .* has no CUDA support"):
        check_provider(Rig("cuda", tiny=True, files=tmp_path))


def test_the_cpu_is_for_rehearsals_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--part", "sweep", "--device", "cpu"])
    assert "add --tiny" in capsys.readouterr().err


def test_the_plan_tells_of_every_part_and_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--plan", "--results", str(tmp_path), "--files", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line[0] != " "] == [f"{part}:" for part in gpu.PARTS]
    assert told.count("minute") >= len(gpu.PARTS)
    contract = Rig("cpu", tiny=False, files=tmp_path).contract("C", "fp16")
    together = portion_size(build_protocol("multi-scale", contract), 1024, None, gpu=True)
    assert f"C multi-scale, 1024 images, {together} together" in told
    assert not list(tmp_path.iterdir())


def _results(tmp_path: Path, limit: float = 100, **changes: Any) -> Results:
    return Results(tmp_path / "gpu-sweep.json", "sweep", {**NOW, **changes}, limit)


def test_a_case_is_measured_once_for_its_versions_and_code(tmp_path: Path) -> None:
    calls: list[int] = []

    def work() -> dict[str, Any]:
        calls.append(1)
        return {"ms": len(calls)}

    for _ in range(2):
        assert _results(tmp_path).measure({"net": "A", "canvas": (1, 2)}, work, 1) == {"ms": 1}
    assert _results(tmp_path, versions={"torch": "3"}).measure({"net": "A", "canvas": (1, 2)}, work, 1) == {"ms": 2}
    assert _results(tmp_path).measure({"net": "C", "canvas": (1, 2)}, work, 1) == {"ms": 3}
    assert _results(tmp_path, source="other").measure({"net": "C", "canvas": (1, 2)}, work, 1) == {"ms": 4}
    data = read_results(tmp_path / "gpu-sweep.json")
    assert [case["result"]["ms"] for case in data["cases"]] == [1, 2, 3, 4]
    assert [case["run"] for case in data["cases"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("held", ["", "{", "{}", "[]", '{"part": "sweep", "runs": 1, "cases": []}', "\x00"])
def test_a_damaged_result_file_is_named_before_anything_is_measured(tmp_path: Path, held: str) -> None:
    (tmp_path / "gpu-sweep.json").write_text(held)
    with pytest.raises(SystemExit, match=r"gpu-sweep\.json: not a result file.*Move it away"):
        _results(tmp_path)


def test_the_digest_of_the_code_is_that_of_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.common.results.ROOT", tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one.py").write_text("1")
    (tmp_path / "two.py").write_text("2")
    found = []
    for changed in ("folder/notes.md", "folder/one.py", "two.py"):
        (tmp_path / changed).write_text("changed")
        digest_of.cache_clear()
        found.append(digest_of("folder", "two.py"))
    digest_of.cache_clear()
    assert len(set(found)) == 3, "what is no code does not count, all else does"
    (tmp_path / "folder" / "notes.md").unlink()
    assert digest_of("folder", "two.py") == found[2]
    digest_of.cache_clear()


def test_what_was_measured_before_a_crash_is_in_the_file(tmp_path: Path) -> None:
    def crash() -> dict[str, Any]:
        raise KeyboardInterrupt

    results = _results(tmp_path)
    results.measure({"net": "A"}, lambda: {"ms": 1.5}, 1)
    with pytest.raises(KeyboardInterrupt):
        results.measure({"net": "C"}, crash, 1)
    assert [case["settings"] for case in read_results(tmp_path / "gpu-sweep.json")["cases"]] == [{"net": "A"}]


def test_a_failure_is_written_and_tried_again_but_a_lack_of_memory_is_a_result(tmp_path: Path) -> None:
    def fail(text: str) -> dict[str, Any]:
        raise RuntimeError(text)

    results = _results(tmp_path)
    found = results.measure({"net": "A"}, lambda: fail("no such kernel"), 1)
    assert found == {"error": "RuntimeError: no such kernel"}
    assert results.failed == [{"net": "A"}]
    assert results.measure({"net": "C"}, lambda: fail("CUDA out of memory. Tried"), 1) == {"out_of_memory": True}
    again = _results(tmp_path)
    assert again.measure({"net": "A"}, lambda: {"ms": float("nan")}, 1) == {"ms": "nan"}  # JSON knows no NaN
    assert again.measure({"net": "C"}, lambda: fail("called again"), 1) == {"out_of_memory": True}
    assert len(json.loads((tmp_path / "gpu-sweep.json").read_text())["cases"]) == 2


def test_a_broken_cuda_context_ends_the_part(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(SystemExit, match="run the same command again"):
        _results(tmp_path).measure({"net": "A"}, fail, 1)
    assert "illegal" in read_results(tmp_path / "gpu-sweep.json")["cases"][0]["result"]["error"]


def test_a_case_for_which_there_is_no_time_is_left_for_the_next_call(tmp_path: Path) -> None:
    results = _results(tmp_path, limit=10)
    assert results.measure({"net": "A"}, lambda: {"ms": 1}, 11) is None
    assert results.skipped == [{"net": "A"}]
    assert results.measure({"net": "C"}, lambda: {"ms": 1}, 9) == {"ms": 1}


def test_results_of_another_part_are_not_overwritten(tmp_path: Path) -> None:
    _results(tmp_path).measure({"net": "A"}, lambda: {"ms": 1}, 1)
    with pytest.raises(SystemExit, match="holds results of part sweep"):
        Results(tmp_path / "gpu-sweep.json", "torch", NOW, 10)


def _write(folder: Path, part: str, *cases: tuple[dict[str, Any], dict[str, Any]], **changes: Any) -> None:
    results = Results(folder / f"gpu-{part}.json", part, {**NOW, **changes}, 100)
    for settings, result in cases:
        results.measure(settings, lambda result=result: result, 1)


C = {"net": "C", "precision": "fp16", "protocol": "multi-scale", "images": 1024, "together": 0}
MIXED = {"what": "mixed", "net": "C"}


def test_goals_without_results_are_not_measured(tmp_path: Path) -> None:
    lines = goals(tmp_path)
    assert len(lines) == 7
    assert all(NOT_MEASURED in line for line in lines)


@pytest.mark.parametrize(
    ("share", "minutes", "eager", "verdict"),
    [(0.601, 8.0, (10.0, 9.9), "met"), (0.599, 8.1, (9.9, 10.1), "not met")],
)
def test_goals_are_judged_at_their_limits(
    tmp_path: Path, share: float, minutes: float, eager: tuple[float, float], verdict: str
) -> None:
    _write(
        tmp_path,
        "throughput",
        ({"what": "views", **C, "together": 256}, {"share_of_peak": 0.01, "minutes_for_imagenet": 100.0}),
        ({"what": "views", **C}, {"share_of_peak": share, "minutes_for_imagenet": 1.0}),
        ({"what": "jpegs", **C}, {"share_of_peak": 0.9, "minutes_for_imagenet": minutes}),
    )
    _write(
        tmp_path,
        "torch",
        ({**MIXED, "competitor": "engine", "way": "pipeline"}, {"images_per_second": 13.0}),
        ({**MIXED, "competitor": "eager", "way": "pairs"}, {"images_per_second": eager[0]}),
        ({**MIXED, "competitor": "eager", "way": "groups"}, {"images_per_second": eager[1]}),
        ({**MIXED, "competitor": "eager-benchmark", "way": "pairs"}, {"images": 48, "too_slow": "given up"}),
        ({**MIXED, "competitor": "compiled", "way": "pairs"}, {"images_per_second": 99.0}),
    )
    _write(
        tmp_path,
        "parity",
        ({"what": "parity", "net": "A"}, {"passed": True}),
        ({"what": "parity", "net": "C"}, {"passed": verdict == "met"}),
    )
    lines = goals(tmp_path)
    judged = [line for line in lines if NOT_MEASURED not in line]
    assert len(judged) == 4
    assert all(f": {verdict} (" in line for line in judged)


@pytest.mark.parametrize("missing", [("eager", "pairs"), ("eager", "groups"), ("eager-benchmark", "pairs"), None])
def test_no_goal_is_met_while_a_way_of_eager_torch_is_left_out(tmp_path: Path, missing: tuple[str, str] | None) -> None:
    ways = {
        ("engine", "pipeline"): 13.0,
        ("eager", "pairs"): 9.0,
        ("eager", "groups"): 9.0,
        ("eager-benchmark", "pairs"): 9.0,
    }
    found = [
        ({**MIXED, "competitor": competitor, "way": way}, {"images_per_second": rate})
        for (competitor, way), rate in ways.items()
        if (competitor, way) != missing
    ]
    _write(tmp_path, "torch", *found)
    (line,) = [line for line in goals(tmp_path) if line.startswith("C on mixed shapes")]
    assert (NOT_MEASURED in line) == (missing is not None)


def test_the_newest_result_counts(tmp_path: Path) -> None:
    for version, minutes in (("1", 3.0), ("2", 9.0)):
        case = ({"what": "jpegs", **C}, {"minutes_for_imagenet": minutes})
        _write(tmp_path, "throughput", case, versions={"torch": version})
    assert any("not met (9 minutes" in line for line in goals(tmp_path))


def test_the_table_tells_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    option = {"what": "options", "net": "C", "precision": "fp16", "search": "HEURISTIC", "nhwc": 1, "fuse_bias": 1}
    rates = {"ms": 12.5, "images_per_second": 640.0, "tflops": 421.0, "share_of_peak": 0.6}
    _write(
        tmp_path,
        "sweep",
        (option, {**rates, "switch_2_ms": 16.25, "switch_6_ms": 17.5}),
        ({**option, "nhwc": 0}, {"out_of_memory": True}),
    )
    text = table(tmp_path)
    assert "| C | fp16 | HEURISTIC | 1 | 1 | 12.5 | 640 | 421 | 60.0 % | 16.2 | 17.5 |" in text
    assert "| C | fp16 | HEURISTIC | 0 | 1 | out of memory | out of memory |" in text
    assert "a change of shape costs C 17.5 ms; the planner assumes" in text
    assert "- sweep, 2026-01-01: a GPU, driver 580; torch 2 (onnxruntime-gpu)" in text
    assert f"### Training steps\n\n{NOT_MEASURED}" in text


def test_docs_hold_the_table_of_the_committed_results(tmp_path: Path) -> None:
    docs = ROOT / "docs" / "gpu.md"
    copy = tmp_path / "gpu.md"
    copy.write_text(docs.read_text(encoding="utf-8"), encoding="utf-8")
    write_into(copy, table(ROOT / "benchmarks" / "results"))
    command = "run: python -m benchmarks.gpu.run --part table --output docs/gpu.md"
    assert copy.read_text(encoding="utf-8") == docs.read_text(encoding="utf-8"), command


def test_a_document_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "other.md"
    document.write_text(f"text {BEGIN} more")
    with pytest.raises(SystemExit, match="marks"):
        write_into(document, "table")
    assert document.read_text() == f"text {BEGIN} more"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nbehind\n")
    write_into(document, "new")
    assert document.read_text() == f"before\n{BEGIN}\nnew\n{END}\nbehind\n"


def test_half_of_the_stated_sizes_are_500x375_or_375x500() -> None:
    sizes = imagenet_sizes.draw(4000, seed=1)
    common = sum(size in {(375, 500), (500, 375)} for size in sizes) / len(sizes)
    assert abs(common - 0.51) < 0.03  # four standard deviations
    assert sum(imagenet_sizes.COMMON.values()) + imagenet_sizes.LONG_500 == pytest.approx(0.95)
    assert all(imagenet_sizes.SHORTEST <= min(size) <= max(size) <= imagenet_sizes.LONGEST for size in sizes)
    assert sum(height < width for height, width in sizes) > sum(height > width for height, width in sizes)
    assert sizes[:50] == imagenet_sizes.draw(4000, seed=1)[:50] != imagenet_sizes.draw(4000, seed=2)[:50]


def test_operations_count_each_size_as_often_as_it_comes(tmp_path: Path) -> None:
    rig = Rig("cpu", tiny=False, files=tmp_path)
    one, other = rig.flop("C", [(224, 224)]), rig.flop("C", [(256, 341)])
    assert rig.flop("C", [(224, 224), (256, 341), (224, 224)]) == 2 * one + other
    assert one == pytest.approx(2 * 53.5e9, rel=0.01)  # docs: 53 G multiply-adds and the head


def test_a_checkout_that_is_not_installed_says_so_in_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "prelunet":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert load._versions({})["prelunet"] == "not installed"


def test_the_mean_and_biases_of_the_measured_nets_are_not_zero(tmp_path: Path) -> None:
    rig = Rig("cpu", tiny=True, files=tmp_path)
    tensors = rig.tensors("A")
    assert (MEAN != 0).all()
    assert all(tensor.std() > 0 for name, tensor in tensors.items() if not name.endswith("weight"))
    assert replace(rig).tensors("A").keys() == tensors.keys()
