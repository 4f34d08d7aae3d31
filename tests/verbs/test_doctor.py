"""`prelunet doctor` passes a correct setup, and finds each fault and how to fix it."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.engine.runtimes import onnx as onnx_runtime
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.serving.server import Server
from prelunet.evaluator.verbs import doctor as doctor_verb
from prelunet.evaluator.verbs import doctor_checks
from prelunet.evaluator.verbs.doctor_checks import Finding, check_machine
from tests.conftest import ExportedNet, with_contract
from tests.helpers.fakes import FakeSession
from tests.serving.serving_harness import run_in_thread, running_server

pytestmark = pytest.mark.processor


def doctor(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Return the exit code, the findings by name, and stderr."""
    code = run(["doctor", "--json", *options])
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["passed"] is (code == 0)
    return code, {finding["name"]: finding for finding in result["findings"]}, printed.err


def found(name: str) -> Finding:
    return next(finding for finding in check_machine("127.0.0.1", 0) if finding.name == name)


def test_a_machine_that_is_set_up_correctly_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings, err = doctor(capsys, "--port", "0")
    assert (code, err) == (0, "")
    assert {name for name, finding in findings.items() if finding["state"] == "wrong"} == set()
    assert findings["versions"]["facts"]["numpy"] == np.__version__
    assert findings["onnxruntime"]["facts"].keys() <= {"onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"}
    assert findings["memory"]["facts"]["bytes"] > 2**28


@pytest.mark.parametrize("device", ["cuda", "openvino", "cpu", "auto"])
def test_a_requested_device_that_is_not_there_is_wrong(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a request it is merely not there."""
    monkeypatch.setattr(doctor_checks, "visible_gpus", lambda: 0)
    monkeypatch.setattr(doctor_checks, "_version", lambda _package: "not installed")
    states = {finding.name: finding.state for finding in check_machine("127.0.0.1", 0, device)}
    for missing in ("cuda", "openvino"):
        assert states[f"device {missing}"] == ("wrong" if missing == device else "note")


def test_without_json_the_findings_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--port", "0"]) == 0
    out = capsys.readouterr().out
    for part in ("device cuda", "onnxruntime", "port"):
        assert part in out


def test_a_damaged_onnxruntime_is_found_and_the_other_checks_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        raise EnvironmentFault("onnxruntime and onnxruntime-gpu are both installed. Keep one")

    monkeypatch.setattr(onnx_runtime, "import_runtime", broken)
    code, findings, err = doctor(capsys, "--port", "0")
    assert code == 6
    assert {name for name, finding in findings.items() if finding["state"] == "wrong"} == {"onnxruntime"}
    assert "1 of 7 findings is wrong:" in err
    assert "- onnxruntime: " in err
    assert "Keep one" in err


@pytest.mark.parametrize(
    ("gpus", "has_cuda", "state", "message"),
    [
        (0, False, "note", "no GPU is visible"),
        (0, True, "note", "could use one"),
        (2, False, "note", "does not support CUDA"),
        (2, True, "ok", "2 GPUs are visible"),
    ],
)
def test_gpus_need_to_be_visible_and_a_runtime_that_supports_them(
    monkeypatch: pytest.MonkeyPatch, gpus: int, has_cuda: bool, state: str, message: str
) -> None:
    monkeypatch.setattr(doctor_checks, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(onnx_runtime, "has_cuda_provider", lambda: has_cuda)
    finding = found("device cuda")
    assert (finding.state, message in finding.message) == (state, True), finding


def test_a_port_in_use_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, findings, _ = doctor(capsys, "--port", str(port))
    assert code == 0, "it may be our server"
    assert findings["port"]["state"] == "note"
    assert "--port" in findings["port"]["fix"]
    assert doctor(capsys, "--port", str(port))[1]["port"]["state"] == "ok"


def test_a_good_model_is_checked_with_its_golden_images_and_its_memory_for_serving_estimated(
    exported: dict[str, ExportedNet], capsys: pytest.CaptureFixture[str]
) -> None:
    path = exported["demo-image"].path
    code, findings, _ = doctor(capsys, "--model", str(path), "--device", "cpu", "--port", "0")
    facts = findings["model"]["facts"]
    assert (code, findings["model"]["state"]) == (0, "ok")
    golden = exported["demo-image"].session.contract.golden
    cases = [(each["case"], each["height"], each["width"], each["passed"]) for each in facts["deviations"]]
    assert cases == [(case, g.height, g.width, True) for case in ("alone", "together") for g in golden]
    assert facts["memory"] > 2**28, "the queue alone takes as much"


def test_a_model_whose_scores_are_off_is_found(
    exported: dict[str, ExportedNet], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = exported["demo-image"]
    first, *others = model.session.contract.golden
    scores = (first.scores[0] + 1e-3, *first.scores[1:])
    wrong = replace(model.session.contract, golden=(*others, replace(first, scores=scores)))
    monkeypatch.setattr(doctor_checks, "open_with_placement", lambda *_, **__: with_contract(model.session, wrong))
    code, findings, err = doctor(capsys, "--model", str(model.path), "--port", "0")
    assert (code, findings["model"]["state"]) == (6, "wrong")
    assert "golden images are off by 1.0e-03" in err
    assert "do not use this device" in err


def test_a_file_that_is_not_a_model_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.onnx"
    text.write_text("no model")
    code, findings, err = doctor(capsys, "--model", str(text), "--device", "cpu", "--port", "0")
    assert (code, findings["model"]["state"]) == (6, "wrong")
    assert "not an ONNX model" in err


def test_a_running_servers_health_and_models_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(six=FakeSession(), seven=FakeSession(seed=1)) as server:
        code, findings, _ = doctor(capsys, "--server", server.address, "--port", "0")
    assert code == 0
    assert findings["server"]["facts"]["health"] == "SERVING"
    assert findings["served models"]["facts"]["models"] == {
        "six": FakeSession().model_sha256,
        "seven": FakeSession(seed=1).model_sha256,
    }


def test_a_server_that_does_not_serve_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    @asynccontextmanager
    async def loading() -> AsyncIterator[str]:
        server = Server("127.0.0.1", 0)
        await server.open()
        yield server.address
        await server.stop(0)

    with run_in_thread(loading) as (address, _):
        code, findings, err = doctor(capsys, "--server", address, "--port", "0")
    assert (code, findings["server"]["facts"]["health"]) == (6, "NOT_SERVING")
    assert "loading its models" in err
    assert "served models" not in findings


def test_an_invalid_address_is_refused_before_any_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--server", "localhost"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "must be host:port" in printed.err) == ("", True), printed


def test_in_lines_each_fault_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    assert run(["doctor", "--server", address, "--port", "0"]) == 6
    printed = capsys.readouterr()
    assert printed.err == "prelunet: 1 of 1 findings is wrong: server. How to fix this is printed with them\n"
    assert "connection refused" in printed.out


def test_in_lines_each_advice_is_printed_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    same = [Finding(name, "it could work better", "note", "buy another machine") for name in ("one", "two")]
    monkeypatch.setattr(doctor_verb, "check_machine", lambda *_: same)
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert (out.count("it could work better"), out.count("buy another machine")) == (2, 1)


def test_of_a_client_only_the_server_is_checked_unless_it_has_a_model(
    exported, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_server(six=FakeSession()) as server:
        _, findings, _ = doctor(capsys, "--server", server.address)
        assert set(findings) == {"server", "served models"}
        model = str(exported["demo-image"].path)
        _, findings, _ = doctor(capsys, "--server", server.address, "--model", model, "--port", "0")
        assert set(findings) > {"server", "model", "device cuda"}


def test_a_missing_server_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    code, findings, err = doctor(capsys, "--server", address, "--port", "0")
    assert (code, findings["server"]["state"]) == (6, "wrong")
    assert f"{address}: UNAVAILABLE" in err
