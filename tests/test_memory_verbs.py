"""What verbs say of memory before the work begins."""

import pytest

from evaluator.engine.memory import memory_need
from evaluator.engine.session import Placement
from evaluator.errors import UsageError
from evaluator.protocols import make_protocol
from evaluator.verbs import memory as memory_module
from evaluator.verbs.memory import foretold, tell_memory
from fakes import FakeSession


def test_a_run_within_its_limit_is_told_with_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    session = FakeSession()
    protocol = make_protocol("multi-scale", session.contract)
    need = foretold(session, protocol, 64)  # type: ignore[arg-type]
    assert need == memory_need(session.contract, protocol, 64, None)
    tell_memory(need)
    said = capsys.readouterr()
    assert said.out == "", "the answer's channel stays free"
    assert said.err == f"memory: at most {need}\n"


def test_a_limit_below_what_a_run_takes_is_refused_before_it_begins() -> None:
    session = FakeSession()
    session.placement = Placement("cpu", memory=100 * 2**20)
    with pytest.raises(UsageError, match=r"--memory-limit 100M: protocol multi-scale takes up to"):
        foretold(session, make_protocol("multi-scale", session.contract), 64)  # type: ignore[arg-type]


def test_a_machine_with_less_than_that_is_warned_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = FakeSession()
    need = foretold(session, make_protocol("multi-scale", session.contract), 64)  # type: ignore[arg-type]
    assert need is not None
    monkeypatch.setattr(memory_module, "machine_memory", lambda: need.total - 1)
    tell_memory(need)
    assert "warning: this machine has" in capsys.readouterr().err
    monkeypatch.setattr(memory_module, "machine_memory", lambda: need.total)
    tell_memory(need)
    assert "warning" not in capsys.readouterr().err


def test_of_a_gpu_nothing_is_foretold(capsys: pytest.CaptureFixture[str]) -> None:
    session = FakeSession(provider="CUDAExecutionProvider")
    need = foretold(session, make_protocol("multi-scale", session.contract), 64)  # type: ignore[arg-type]
    tell_memory(need)
    assert need is None
    assert capsys.readouterr().err == ""
