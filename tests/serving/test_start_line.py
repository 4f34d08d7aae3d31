"""The start line of a server."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.serving import lifecycle
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.options import ModelFile
from tests.helpers.fakes import FakeSession


def start_line(**sessions: Any) -> str:
    models = Models([(ModelFile(name, Path("m.onnx")), session) for name, session in sessions.items()], DecodeLimits())
    try:
        return lifecycle.start_line("127.0.0.1:1", {}, models, 3 * 2**30)
    finally:
        models.close()


def test_equal_circumstances_of_all_models_are_stated_once() -> None:
    line = start_line(a=FakeSession(), b=FakeSession(seed=1))
    assert line.count("CPUExecutionProvider, fp32 (fake 1)") == 1
    assert "| CPUExecutionProvider, fp32 (fake 1) grpcio " in line
    assert "| memory at most 3.00G" in line


def test_different_circumstances_are_each_stated() -> None:
    other = FakeSession(seed=1)
    other.circumstances = replace(other.circumstances, provider="OpenVINO", precision="bf16")
    line = start_line(a=FakeSession(), b=other, c=FakeSession(seed=2))
    assert "| CPUExecutionProvider, fp32 (fake 1); OpenVINO, bf16 (fake 1) grpcio " in line
