"""`prelunet bench`: counts match the images, and the arithmetic is right."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.cli import run
from prelunet.evaluator.datasets.dataset import Dataset, DatasetSpec
from prelunet.evaluator.datasets.open import open_from_spec
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.session import Outputs, Placement
from prelunet.evaluator.errors import ContractError, DatasetError, EnvironmentFault
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.imaging.views import make_views
from prelunet.evaluator.machine import supports_bf16
from prelunet.evaluator.profiling.engines import EngineComparison, compare_engines
from prelunet.evaluator.profiling.profile import Measurement, benchmark
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
    assert measured.totals.padding == 0
    # four portions, as far as there are images
    assert (measured.images_together, measured.threads) == (7, 2)


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
    assert read[-5:] == ["00.png", "05.png", "10.png", "15.png", "20.png"]


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


def test_rates_and_shares_are_of_the_threads_that_do_it() -> None:
    spent = {"compute": 16.0, "decode": 10.0, "average": 1.0, "wait": 3.0}
    totals = StageTotals({**dict.fromkeys(STAGES, 0.0), **spent}, images=40, view_pixels=90, canvas_pixels=100)
    measured = Measurement(40, 0, 10.0, 10, sessions=2, threads=4, totals=totals)
    assert measured.images_per_second == 4.0
    stages = {stage["stage"]: stage for stage in measured.stages()}
    assert stages["decode"] == {"stage": "decode", "threads": 4, "seconds": 10.0, "ms_per_image": 250.0, "share": 0.25}
    assert (stages["compute"]["share"], stages["average"]["share"], stages["wait"]["threads"]) == (0.8, 0.1, 2)
    assert measured.to_json()["padding"] == 0.1


@pytest.mark.parametrize(
    ("spent", "words"),
    [
        (
            {"compute": 19.0, "decode": 30.0},
            "Bound by computing, which takes 95% of its threads' time. A faster engine",
        ),
        ({"compute": 9.0, "read": 16.0, "resize": 20.0}, "Bound by reading and decoding, which takes 90%"),
        ({"compute": 9.0, "decode": 9.0, "pack": 8.0, "upload": 8.0}, "Bound by packing batches, which takes 80%"),
        ({"compute": 9.0, "average": 8.0, "wait": 11.0}, "Bound by averaging scores, which takes 80%"),
        ({"compute": 13.0, "decode": 20.0, "wait": 7.0}, "No step is busy most of the time"),
    ],
)
def test_the_step_whose_threads_are_busy_bounds_the_rate(spent: dict[str, float], words: str) -> None:
    totals = StageTotals({**dict.fromkeys(STAGES, 0.0), **spent}, images=40)
    measured = Measurement(40, 0, 10.0, 10, sessions=2, threads=4, totals=totals)
    assert measured.bound().startswith(words)
    assert measured.to_json()["bound"] == measured.bound()


BF16 = EngineComparison("openvino", "bf16", 5.8, images=2000, other_first_answers=6)


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
    assert tuple(line.split()[0] for line in lines[1:9]) == STAGES
    assert lines[1].split()[1] == "2"
    assert "25 images, 1 of them refused, 96 views, dense-29-36\n" in output.out
    assert re.search(r"s: \S+ images/s, padding 0\.0%\n(Bound by|No step is) ", output.out)
    assert lines[-1] == (
        "--device openvino --precision bf16: 5.8 times as fast here, other first answers for 6 of 2,000 images"
    )
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
