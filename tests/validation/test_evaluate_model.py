"""The memory that an evaluation takes: estimated, limited and reported before the work begins."""

from dataclasses import replace
from pathlib import Path

import pytest

from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.datasets.sources.folder import FolderSource
from prelunet.evaluator.engine.load import open_with_placement
from prelunet.evaluator.engine.memory import estimate_memory
from prelunet.evaluator.engine.runtimes import onnx
from prelunet.evaluator.engine.session import Placement
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.terminal import report
from prelunet.evaluator.validation import evaluate_model as memory_module
from prelunet.evaluator.validation.evaluate_model import estimate_run_memory, report_memory
from tests.conftest import ExportedNet
from tests.helpers.fakes import FakeSession


def test_the_estimate_of_a_run_within_its_limit_is_printed_if_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = FakeSession()
    protocol = build_protocol("multi-scale", session.contract)
    need = estimate_run_memory(session, protocol, 64)  # type: ignore[arg-type]
    assert need == estimate_memory(session, protocol, 64, None)  # type: ignore[arg-type]
    report_memory(need, report)
    assert capsys.readouterr() == ("", "")
    report_memory(need, report, verbose=True)
    printed = capsys.readouterr()
    assert printed.out == "", "stdout holds only the result"
    assert printed.err == f"memory: at most {need}\n"


def test_a_limit_below_the_estimate_is_refused_before_the_run_begins() -> None:
    session = FakeSession()
    session.placement = Placement("cpu", memory=100 * 2**20)
    with pytest.raises(UsageError, match=r"--memory-limit 100M: protocol multi-scale takes up to"):
        estimate_run_memory(session, build_protocol("multi-scale", session.contract), 64)  # type: ignore[arg-type]


def test_a_limit_too_small_for_loading_is_refused_before_the_file_is_loaded(
    exported: dict[str, ExportedNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported["demo-channel"].path
    monkeypatch.setattr(onnx, "load_on_cpu", None)  # a call of it would be another error
    with pytest.raises(
        UsageError,
        match=r"loading the model alone takes up to 13\dM, but .* may take 128M\. Raise --memory-limit",
    ):
        open_with_placement(path, Placement("cpu", memory=2**27))


def test_a_machine_with_less_memory_than_the_estimate_causes_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = FakeSession()
    need = estimate_run_memory(session, build_protocol("multi-scale", session.contract), 64)  # type: ignore[arg-type]
    monkeypatch.setattr(memory_module, "machine_memory", lambda: need.total - 1)
    report_memory(need, report)
    assert "warning: this machine has" in capsys.readouterr().err
    monkeypatch.setattr(memory_module, "machine_memory", lambda: need.total)
    report_memory(need, report)
    assert "warning" not in capsys.readouterr().err


def test_the_samples_and_the_largest_file_are_counted() -> None:
    session = FakeSession()
    session.placement = Placement("cpu", threads=3)
    protocol = build_protocol("multi-scale", session.contract)
    samples = [Sample("a.png", 0, 100), Sample("b.png", 1, 7000), Sample("c.png", 2, 10)]
    dataset = Dataset(Path("images"), ("a", "b", "c"), samples, FolderSource(Path("images")))
    means = replace(dataset, exact_sizes=False)  # as of parquet files: an image may be as large as is accepted
    for images, largest in ((dataset, 7000), (means, DecodeLimits.max_bytes)):
        need = estimate_run_memory(session, protocol, 64, images)  # type: ignore[arg-type]
        assert need == estimate_memory(session, protocol, 64, None, images=3, encoded=3 * largest)  # type: ignore[arg-type]


def test_with_gpus_main_memory_is_estimated_and_limited_too() -> None:
    session = FakeSession(provider="CUDAExecutionProvider")
    protocol = build_protocol("multi-scale", session.contract)
    need = estimate_run_memory(session, protocol, 1024, sessions=2)  # type: ignore[arg-type]
    assert need == estimate_memory(session, protocol, 1024, None, sessions=2)  # type: ignore[arg-type]
    session.placement = Placement("cuda", memory=2**30)
    with pytest.raises(UsageError, match=r"--memory-limit 1\.00G: protocol multi-scale takes up to"):
        estimate_run_memory(session, protocol, 1024)  # type: ignore[arg-type]
