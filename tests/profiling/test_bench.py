"""`prelunet bench`: counts match the images, the arithmetic is right, and the advice follows the numbers."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.architectures import OpaqueNet, architecture, multiply_adds
from prelunet.evaluator.cli import run
from prelunet.evaluator.datasets.dataset import Dataset, DatasetSpec
from prelunet.evaluator.datasets.open import open_from_spec
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.runtimes import Device
from prelunet.evaluator.engine.runtimes.base import Precision
from prelunet.evaluator.engine.session import Outputs, Placement
from prelunet.evaluator.errors import ContractError, DatasetError, EnvironmentFault
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.imaging.views import make_views
from prelunet.evaluator.machine import supports_bf16
from prelunet.evaluator.profiling.bottleneck import advice, describe_bottleneck, find_bottleneck
from prelunet.evaluator.profiling.engines import EngineComparison, compare_engines
from prelunet.evaluator.profiling.profile import IsolatedCompute, Measurement, benchmark, measure_isolated
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.timing import STAGES, StageTotals
from tests.helpers.fakes import FakeSession, fake_contract

TWO_SCALES = build_protocol("dense-29-36", fake_contract())
IMAGES, BAD = 25, 11


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay out 25 images without any label; one is damaged."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(3)
    for index in range(IMAGES):
        size = (31 + index % 4 * 9, 30 + index % 3 * 13)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / f"{index:02}.png")
    (folder / f"{BAD:02}.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def dataset(data: Path) -> Dataset:
    return open_from_spec(DatasetSpec(data, no_labels=True), fake_contract().classes)


def test_all_images_are_counted_once_and_so_is_what_they_cost(dataset: Dataset) -> None:
    measured = benchmark([FakeSession()], dataset, TWO_SCALES, 64, threads=2, images=IMAGES, seconds=0.1)
    views = [
        view
        for index, sample in enumerate(dataset.samples)
        if index != BAD
        for view in make_views(decode_rgb(dataset.read(sample)), TWO_SCALES)
    ]
    assert (measured.images, measured.refused) == (IMAGES, 1)
    assert (measured.totals.images, measured.totals.views) == (IMAGES, len(views))
    assert measured.multiply_adds == sum(
        multiply_adds(architecture("demo"), *view.image.shape[:2], 6) for view in views
    )
    assert measured.totals.padding == 0
    assert len({view.image.shape for view in views}) <= measured.canvases <= measured.totals.batches
    # four portions, as far as there are images
    assert (measured.images_together, measured.usually_together, measured.threads) == (7, 64, 2)


def test_a_limit_and_the_seconds_bound_the_number_of_images(dataset: Dataset) -> None:
    messages: list[str] = []
    few = benchmark([FakeSession()], dataset, TWO_SCALES, 2, images=6, seconds=0.1, report=messages.append)
    assert (few.images, few.totals.images, few.images_together) == (6, 6, 2)
    assert messages[0].startswith("measuring 6 of 25 images")
    hurried = benchmark([FakeSession()], dataset, TWO_SCALES, 64, seconds=1e-9)
    assert hurried.images == 1
    patient = benchmark([FakeSession()], dataset, TWO_SCALES, 64, seconds=3600)
    assert patient.images == IMAGES


def test_the_images_are_spread_evenly_over_the_dataset(dataset: Dataset) -> None:
    read: list[str] = []

    class Noting:
        def read(self, file: str) -> bytes:
            read.append(file)
            return dataset.reader.read(file)

    benchmark([FakeSession()], replace(dataset, reader=Noting()), TWO_SCALES, 64, threads=1, images=5, seconds=1e-9)
    assert read[-10:-5] == ["00.png", "05.png", "10.png", "15.png", "20.png"]


def test_afterwards_the_same_batches_are_computed_with_nothing_else_running(dataset: Dataset) -> None:
    class Watching(FakeSession):
        def __init__(self) -> None:
            super().__init__()
            self.threads: list[threading.Thread] = []
            self.others: list[list[str]] = []

        def compute(self, staged: Any) -> Outputs:
            self.threads.append(threading.current_thread())
            self.others.append([one.name for one in threading.enumerate() if "-0" in one.name and one not in before])
            return super().compute(staged)

    before = threading.enumerate()  # of other tests
    session = Watching()
    measured = benchmark([session], dataset, TWO_SCALES, 64, threads=2, images=IMAGES, seconds=1e-9)
    batches = measured.totals.batches
    assert measured.isolated.batches == batches
    assert measured.isolated.canvas_pixels == measured.totals.canvas_pixels
    assert sorted(session.calls[-batches:]) == sorted(session.calls[-2 * batches : -batches])
    assert set(session.threads[-batches:]) == {threading.main_thread()}
    assert all(others == [] for others in session.others[-batches:]), "the pipeline's threads still run"
    assert threading.main_thread() not in session.threads[:-batches]


@pytest.mark.parametrize(("enough", "portions"), [(0.1, [0]), (1.0, [0]), (1.1, [0, 5]), (4.0, [0, 5, 2, 7]), (99, 8)])
def test_isolated_computing_ends_when_it_suffices_and_is_spread_over_all_portions(
    dataset: Dataset, enough: float, portions: list[int] | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight portions of an image each, of which a session computes two scales in half a second each."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    read: list[str] = []

    class Noting:
        def read(self, file: str) -> bytes:
            read.append(file)
            return dataset.reader.read(file)

    class Clocked(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            clock.now += 0.5
            return super().compute(staged)

    monkeypatch.setattr("prelunet.evaluator.profiling.profile.time", clock)
    monkeypatch.setattr("prelunet.evaluator.profiling.profile.ISOLATED_SECONDS", enough)
    images = [[sample] for sample in dataset.samples[:8]]
    alone = measure_isolated(Clocked(), replace(dataset, reader=Noting()), TWO_SCALES, images, 2)
    assert alone.seconds == len(read) == alone.batches / 2
    assert (len(read) if isinstance(portions, int) else [int(file[:2]) for file in read]) == portions


def test_the_warm_up_counts_for_nothing_and_every_session_takes_part(dataset: Dataset) -> None:
    sessions = [FakeSession(), FakeSession()]
    measured = benchmark(sessions, dataset, TWO_SCALES, 64, images=IMAGES, seconds=10.0)
    assert measured.sessions == 2
    assert len(sessions[0].calls) + len(sessions[1].calls) > measured.totals.batches


def test_a_dataset_without_images_or_without_one_that_can_be_read_is_refused(dataset: Dataset) -> None:
    with pytest.raises(DatasetError, match="contains no images"):
        benchmark([FakeSession()], replace(dataset, samples=[]), TWO_SCALES, 64)
    with pytest.raises(DatasetError, match="none of 1 images can be read"):
        benchmark([FakeSession()], replace(dataset, samples=dataset.samples[BAD : BAD + 1]), TWO_SCALES, 64)


def test_an_adopted_net_of_unknown_cost_has_no_gflops(dataset: Dataset) -> None:
    session = FakeSession(fake_contract(architecture=OpaqueNet("resnet", "unknown")))
    measured = benchmark([session], dataset, TWO_SCALES, 64, images=3, seconds=0.01)
    assert measured.multiply_adds is None
    assert measured.gflops is None
    assert measured.to_json()["gflops"] is None


def test_the_peak_of_memory_is_in_bytes_and_stays_when_memory_is_released() -> None:
    """In a process of its own: the peak of this one is that of all tests before."""
    code = """
from prelunet.evaluator.profiling.profile import peak_memory
before, held = peak_memory(), bytearray(b"x") * 2**27
del held
print(before, peak_memory())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    before, after = map(int, done.stdout.split())
    assert 2**24 < before < 2**29
    assert 0.9 * 2**27 < after - before < 1.5 * 2**27  # other memory may have come or gone


def measurement(
    sessions: int = 1, threads: int = 2, seconds: float = 10.0, alone: float | None = None, **spent: Any
) -> Measurement:
    """Return a measurement of 40 images.

    alone: seconds in which a session would compute everything alone, None for the seconds of `spent`; spent: seconds by
    stage; other names replace counts.
    """
    stages = {stage: spent.pop(stage, 0.0) for stage in STAGES}
    counts = {"images": 40, "views": 80, "batches": 20, "canvas_changes": 4, "view_pixels": 90, "canvas_pixels": 100}
    totals = StageTotals(stages, **{**counts, **spent})
    # Alone a session computed half of the pixels.
    alone = IsolatedCompute((stages["compute"] if alone is None else alone) / 2, 10, totals.canvas_pixels // 2)
    return Measurement(40, 0, seconds, 10, 64, sessions, threads, totals, 3, 5_000_000_000, 2**30, alone)


def test_rates_and_shares_are_of_the_threads_that_do_it() -> None:
    measured = measurement(sessions=2, threads=4, compute=16.0, decode=10.0, average=1.0, wait=3.0, alone=12.8)
    assert measured.images_per_second == 4.0
    assert measured.gflops == 1.0
    assert (measured.share("compute"), measured.share("decode"), measured.share("average")) == (0.8, 0.25, 0.1)
    assert measured.pure_compute == 12.8
    assert measured.wall_by_compute == pytest.approx(20 / 12.8)
    assert measured.slowed == pytest.approx(1.25)
    stages = {stage["stage"]: stage for stage in measured.to_json()["stages"]}
    assert stages["decode"] == {"stage": "decode", "threads": 4, "seconds": 10.0, "ms_per_image": 250.0, "share": 0.25}
    assert stages["wait"]["threads"] == 2
    assert measured.to_json()["padding"] == 0.1


@pytest.mark.parametrize(
    ("spent", "cause", "words"),
    [
        ({"compute": 9.7, "wait": 0.2, "decode": 19.0}, "compute", "the session alone would take 97% of the time"),
        ({"compute": 9.5, "wait": 0.5, "alone": 9.1, "decode": 6.0}, "compute", "alone would take 91% of the time"),
        ({"compute": 9.5, "wait": 0.5, "alone": 7.6, "decode": 6.0, "pack": 5.0}, "sharing",
         "computes 95% of the time, 1.25 times as long as alone"),
        ({"compute": 9.5, "alone": 5.0, "read": 9.0, "decode": 1.0, "pack": 0.9, "upload": 0.2}, "sharing",
         "1.90 times as long as alone"),
        ({"compute": 5.5, "wait": 4.0, "decode": 12.0, "resize": 6.0, "read": 1.0}, "decoding",
         "bound by decoding and resizing: the session waits 40% of the time"),
        ({"compute": 5.5, "wait": 4.0, "decode": 2.0, "read": 16.0}, "reading", "bound by reading the images"),
        ({"compute": 5.5, "wait": 4.0, "pack": 5.0, "upload": 4.0, "decode": 1.0}, "packing", "bound by packing"),
        ({"compute": 5.5, "wait": 4.0, "average": 9.5}, "averaging", "bound by averaging"),
        ({"compute": 5.5, "wait": 4.0, "decode": 12.0}, "nothing", "too few images"),
        ({"compute": 8.0, "wait": 1.4, "alone": 6.7, "decode": 8.0}, "nothing", "too few images"),
        ({"compute": 8.0, "wait": 1.4, "alone": 6.5, "decode": 8.0}, "sharing", "1.23 times as long as alone"),
    ],
)  # fmt: skip
def test_what_bounds_the_rate_is_what_is_busy_while_the_session_waits(
    spent: dict[str, float], cause: str, words: str
) -> None:
    assert find_bottleneck(measurement(**spent)) == cause
    assert words in describe_bottleneck(measurement(**spent))


@pytest.mark.parametrize(
    ("spent", "cause", "words"),
    [
        ({"compute": 9.9, "alone": 10.6}, "disturbed", "0.93 times as long as the same batches alone"),
        ({"compute": 9.9, "alone": 7.0, "decode": 0.2, "resize": 0.1}, "disturbed", "1.41 times"),
        ({"compute": 9.9, "alone": 10.4}, "compute", "the session alone would take 104%"),
        ({"compute": 9.9, "alone": 7.0, "decode": 1.0}, "sharing", "1.41 times"),
        ({"compute": 0.9, "alone": 0.9, "seconds": 0.99}, "short", "too short to judge: 0.99 s"),
    ],
)
def test_a_disturbed_or_short_measurement_is_not_judged(spent: dict[str, float], cause: str, words: str) -> None:
    assert find_bottleneck(measurement(**spent)) == cause
    assert words in describe_bottleneck(measurement(**spent))
    if cause in {"disturbed", "short"}:
        (again,) = advice(measurement(**spent), 0)
        assert again.startswith("measure")


COMPUTING = {"compute": 9.9}


def engine(device: Device, precision: Precision, times_as_fast: float) -> EngineComparison:
    return EngineComparison(device, precision, times_as_fast, images=2000, other_first_answers=6)


BF16 = engine("openvino", "bf16", 5.8)


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prelunet.evaluator.profiling.bottleneck.cores", lambda: 8)


@pytest.mark.usefixtures("eight_cores")
def test_advice_for_a_cpu_that_computes_all_the_time_is_a_faster_engine_with_its_measured_numbers_or_threads() -> None:
    best, other = advice(measurement(**COMPUTING), 0, [engine("openvino", "fp32", 1.06), BF16])
    assert best.startswith(
        "--device openvino --precision bf16: 5.8 times as fast here, other first answers for 6 of 2,000 images. "
    )
    assert other.startswith("--device openvino --precision fp32: 1.1 times as fast here")
    assert "230 times as fast" in str(engine("cpu", "fp32", 234.0))
    slower = [engine("cpu", "fp32", 1.04), engine("openvino", "bf16", 0.9)]
    assert advice(measurement(**COMPUTING), 0, slower) == []
    threads, _ = advice(measurement(**COMPUTING), 3, [BF16])
    assert threads.startswith("--threads 0 uses all 8 cores; now 3")


class SlowSession(FakeSession):
    """A session of a given precision that takes 20 ms more per call, and prefers other classes for another seed."""

    def compute(self, staged: Any) -> Outputs:
        time.sleep(0.02)
        return super().compute(staged)


def test_engines_are_compared_by_time_and_first_answers_except_those_that_are_missing_or_in_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session, opened = SlowSession(), []
    others = {"fp32": FakeSession(), "bf16": FakeSession(seed=1)}

    def open_other(path: Path, placement: Placement, *, digest: str) -> FakeSession:
        opened.append((path, placement.device, placement.precision, digest))
        if placement.precision == "int8":
            raise ContractError("an operator that this engine does not know")
        if placement.precision == "bf16" and "bf16" not in others:
            raise EnvironmentFault("no bf16 here")
        return others[placement.precision or ""]

    monkeypatch.setattr("prelunet.evaluator.profiling.engines.open_with_placement", open_other)
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (31 + number, 40, 3), np.uint8) for number in range(12)]
    views = [make_views(picture, TWO_SCALES) for picture in pictures]
    same, different, ncnn = compare_engines(session, tmp_path, views, TWO_SCALES)
    engines = [("openvino", "fp32"), ("openvino", "bf16"), ("openvino", "int8"), ("ncnn", "fp32")]
    assert opened == [(tmp_path, *engine, session.model_sha256) for engine in engines]
    assert (ncnn.device, ncnn.precision, ncnn.other_first_answers) == ("ncnn", "fp32", 0)
    assert (same.device, same.precision, same.images, same.other_first_answers) == ("openvino", "fp32", 12, 0)
    assert same.times_as_fast > 1
    answers = [
        [classify_images(one, [picture], TWO_SCALES)[0].top(1) for picture in pictures]
        for one in (session, others["bf16"])
    ]
    expected = sum(a[0][0] != b[0][0] for a, b in zip(*answers, strict=True))
    assert different.other_first_answers == expected
    assert expected > 0, "the two sessions should differ, or nothing is counted"
    del others["bf16"]
    assert [each.precision for each in compare_engines(session, tmp_path, views, TWO_SCALES)] == ["fp32", "fp32"]


@pytest.mark.usefixtures("eight_cores")
def test_advice_for_a_session_that_waits_is_about_what_it_waits_for() -> None:
    decoding = {"compute": 5.0, "wait": 5.0, "decode": 20.0}
    (more,) = advice(measurement(**decoding), 0)
    assert more == "--threads 8: 2 of 8 cores decode"
    (smaller,) = advice(measurement(threads=8, compute=5.0, wait=5.0, decode=79.0), 0)
    assert "closer to the protocol's scales" in smaller
    sharing = {"compute": 9.9, "alone": 8.0, "decode": 6.0}
    (faster,) = advice(measurement(**sharing), 0, [BF16])
    assert faster.startswith("--device openvino")
    (disk,) = advice(measurement(compute=5.0, wait=5.0, read=20.0), 0)
    assert "faster disk" in disk
    (longer,) = advice(measurement(compute=5.0, wait=5.0), 0)
    assert "--seconds" in longer
    assert advice(measurement(compute=5.0, wait=5.0, average=9.0), 0) == []


@pytest.mark.parametrize(
    ("flags", "known"), [("fpu avx2 avx512_bf16", True), ("fpu amx_bf16", True), ("fpu avx512f", False), ("", False)]
)
def test_bfloat16_is_read_from_the_kernels_list_of_instructions(
    flags: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        f"processor\t: 0\nmodel name\t: avx512_bf16 is no flag here\nflags\t\t: {flags}\n\nflags\t\t: amx_bf16\n"
    )
    assert supports_bf16(tmp_path) == known
    assert not supports_bf16(tmp_path / "absent")


# prelunet bench


class OpenedSession(FakeSession):
    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement


@pytest.fixture
def command(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Give the command line with a model behind `open_sessions`."""
    session = OpenedSession(Placement("cpu"))
    monkeypatch.setattr("prelunet.evaluator.verbs.bench.open_sessions", lambda *_: [session])
    monkeypatch.setattr("prelunet.evaluator.verbs.bench.compare_engines", lambda *_: [BF16])
    (tmp_path / "m.onnx").write_bytes(b"x" * 100)

    def call(*more: str, images: Path = data) -> int:
        options = ["--model", str(tmp_path / "m.onnx"), "--data", str(images), "--protocol", "dense-29-36"]
        return run(["bench", *options, "--seconds", "0.2", *more])

    return call


def test_the_table_has_every_stage_and_states_what_was_measured(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command("--limit", "25", "--threads", "2") == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0].split() == ["stage", "threads", "seconds", "ms/image", "share", "of", "time"]
    assert [line.split()[0] for line in lines[1:9]] == [stage for stage in STAGES if stage != "write"]
    assert lines[1].split()[1] == "2"
    assert "25 images, 1 of them refused, 96 views, dense-29-36, in portions of 7 (64 in a run)" in output.out
    for part in ("images/s", "GFLOP/s", "padding 0.0%", "peak memory of this process", "estimated maximum"):
        assert part in output.out
    assert re.search(r"wall time / compute time in isolation \d+\.\d+ \((\d+) of \1 batches repeated\)", output.out)
    assert "measuring 25 of 25 images" in output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx"], "nothing is written unless asked for"


def test_json_on_stdout_and_in_the_file_holds_the_measurement_and_its_circumstances(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command("--limit", "9", "--json", "-o", str(tmp_path / "bench.json")) == 0
    output = json.loads(capsys.readouterr().out)
    assert output == json.loads((tmp_path / "bench.json").read_text())
    assert (output["images"], output["protocol"]["scales"], output["dataset"]["images"]) == (9, [29, 36], IMAGES)
    assert output["circumstances"]["provider"] == "CPUExecutionProvider"
    assert output["memory_foretold"] > 0
    assert output["memory_peak"] > 0
    assert isinstance(output["bound"], str)
    assert isinstance(output["advice"], list)
    assert output["engines"] == [BF16.to_json()]


def test_a_folder_without_images_exits_2(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert command(images=tmp_path / "empty") == 2
    assert "empty" in capsys.readouterr().err


def test_of_a_folder_with_train_and_val_it_opens_val_as_validate_does(
    command: Callable[..., int], data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("train", "val"):
        (tmp_path / "root" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "root" / name).symlink_to(data)
    assert command("--limit", "5", images=tmp_path / "root") == 0
    assert "measuring 5 of 25 images" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["missing/bench.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, output: str
) -> None:
    assert command("--limit", "5", "-o", str(tmp_path / output)) == 2
    printed = capsys.readouterr()
    assert "choose another path" in printed.err.lower()
    assert (printed.out, "measuring" in printed.err) == ("", False)


def test_an_interrupt_reports_that_nothing_was_saved(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prelunet.evaluator.verbs.bench.benchmark", interrupt)
    assert command("--limit", "5") == 4
    assert "nothing was saved" in capsys.readouterr().err


def test_several_gpus_on_a_cpu_exit_2(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["bench"], ["validate", "--run", "never-made"]):
        assert run([*verb, "--model", "m.onnx", "--data", str(data), "--device", "cpu", "--gpus", "2"]) == 2
        assert "--gpus 2: --device cpu has no GPUs" in capsys.readouterr().err
    ray = ["--run", "never-made", "--gpus", "2", "--ray", "auto"]
    assert run(["validate", "--model", "m.onnx", "--data", str(data), *ray]) == 2
    assert "--gpus cannot be used with --ray" in capsys.readouterr().err
