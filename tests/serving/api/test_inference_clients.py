"""The Open Inference Protocol with third-party clients: NVIDIA's tritonclient, and buf curl with reflection."""

import base64
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.pb.inference import inference_pb2 as pb
from prelunet.evaluator.protocols import ProtocolOverrides, build_protocol
from tests.helpers.fakes import FakeSession
from tests.serving.api.inference_calls import IMAGE
from tests.serving.api.triton_fields import fields_of
from tests.serving.serving_harness import RunningServer, png, running_server

ROOT = Path(__file__).parents[3]
IMAGES = [png(40, 57, seed=1), png(33, 31, seed=2), png(70, 45, seed=3)]
BUF = shutil.which("buf") or next(map(str, ROOT.glob(".buf/node_modules/.bin/buf")), None)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None, reason="tritonclient is not installed; pip install '.[dev]'"
)
needs_buf = pytest.mark.skipif(BUF is None, reason="buf is not installed; make lint-proto brings it")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(six=FakeSession()) as running:
        yield running


@pytest.fixture(scope="module")
def results(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the client, which runs in its own process."""
    folder = tmp_path_factory.mktemp("images")
    for place, image in enumerate(IMAGES):
        (folder / f"{place}.png").write_bytes(image)
    files = [str(folder / f"{place}.png") for place in range(len(IMAGES))]
    program = [sys.executable, "-m", "tests.serving.api.triton_calls", server.address, *files]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def scores() -> np.ndarray:
    """Return the scores of each image classified alone."""
    session = FakeSession()
    requested = build_protocol("ten-crop", session.contract, ProtocolOverrides(mirror=False))
    return np.stack([classify_images(session, [decode_rgb(image)], requested)[0].scores for image in IMAGES])


def same(actual: Any, expected: np.ndarray) -> None:
    """Assert equal scores; in another batch the fake's einsum may add in another order."""
    np.testing.assert_allclose(np.array(actual, np.float32), expected, rtol=1e-5)


@needs_triton
def test_our_messages_and_methods_are_those_of_tritonclient(results) -> None:
    theirs = results["protocol"]
    ours: dict[str, Any] = {}
    for descriptor in pb.DESCRIPTOR.message_types_by_name.values():
        ours |= fields_of(descriptor)
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        ours[enum.full_name] = {value.name: value.number for value in enum.values}
    assert len(ours) > 40
    for name, fields in ours.items():
        for field, description in fields.items():
            assert theirs["messages"][name].get(field) == description, (name, field)
    methods = {
        method.name: [
            method.input_type.full_name,
            method.output_type.full_name,
            method.client_streaming,
            method.server_streaming,
        ]
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    }
    assert {name: theirs["methods"][name] for name in methods} == methods
    verbs = ("Status", "Register", "Unregister")
    shared_memory = {f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in verbs}
    assert theirs["methods"].keys() == {*methods, *shared_memory, "TraceSetting", "LogSettings"}, (
        "a method of the client that we neither implement nor document as UNIMPLEMENTED"
    )


@needs_triton
@pytest.mark.parametrize("way", ["scores", "column", "gzip", "deflate"])
def test_tritonclient_gets_the_scores_of_the_model(results, scores, way: str) -> None:
    same(results["sync"][way], scores)
    assert (results["sync"]["type"], results["sync"]["id"]) == ("float32", "photo 7")


@needs_triton
@pytest.mark.parametrize("client", ["sync", "aio"])
def test_tritonclient_gets_the_best_classes(results, scores, client: str) -> None:
    rows = results[client]["classes"]
    assert len(rows) == 3
    for row, of_image in zip(rows, scores, strict=True):
        best = np.argsort(-of_image, kind="stable")[:3]
        assert [text.split(":", 1)[1] for text in row] == [f"{index}:class {index}" for index in best]
        same([float(text.split(":")[0]) for text in row], np.round(of_image[best], 6))


@needs_triton
def test_tritonclient_gets_answers_with_callbacks_and_streams(results, scores) -> None:
    assert results["sync"]["async errors"] == []
    *good, bad = results["sync"]["stream"]
    assert [name for name, *_ in good] == ["0", "1", "2"]
    same([row for _, row, _ in good], scores)
    assert "images[0]: " in bad[2]


@needs_triton
def test_tritonclients_asyncio_client_gets_the_scores_of_the_model(results, scores) -> None:
    assert results["aio"]["ready"] == [True, True]
    same(results["aio"]["scores"], scores)
    same([row for row, _ in results["aio"]["stream"]], scores)
    assert results["aio"]["bad model"][0] == "StatusCode.NOT_FOUND"
    assert results["aio"]["config"] == results["sync"]["of server"]["config"]


@needs_triton
@pytest.mark.parametrize(
    ("call", "status", "text"),
    [
        ("bad image", "INVALID_ARGUMENT", "images[1]: "),
        ("bad model", "NOT_FOUND", "no model 'nine' is served. There are: six"),
        ("negative timeout", "INVALID_ARGUMENT", "Expected `int` >= 0 - at `$.timeout`"),
        ("priority", "INVALID_ARGUMENT", "'priority' should be 0"),
        ("sequence", "INVALID_ARGUMENT", "unknown field `sequence_"),
        ("no time", "DEADLINE_EXCEEDED", ""),
    ],
)
def test_tritonclient_gets_errors_that_explain(results, call: str, status: str, text: str) -> None:
    code, message = results["sync"][call]
    assert (code, text in message) == (f"StatusCode.{status}", True), message


@needs_triton
def test_tritonclient_gets_descriptions_of_server_and_models(results) -> None:
    of_server = results["sync"]["of server"]
    assert (of_server["live"], of_server["ready"], of_server["model ready"]) == (True, True, [True, False, False])
    assert of_server["server"]["name"] == "prelunet"
    assert of_server["model"]["inputs"] == [{"name": "images", "datatype": "BYTES", "shape": ["-1", "1"]}]
    config = of_server["config"]["config"]
    assert (config["max_batch_size"], config["input"]) == (
        64,
        [{"name": "images", "data_type": "TYPE_STRING", "dims": ["1"]}],
    )
    assert of_server["index"]["models"] == [{"name": "six", "version": "1", "state": "READY"}]
    (statistics,) = of_server["statistics"]["model_stats"]
    assert int(statistics["inference_count"]) >= 4 * len(IMAGES)
    assert int(statistics["inference_stats"]["compute_infer"]["ns"]) > 0
    for call in ("no loading", "no unloading"):
        assert of_server[call][0] == "StatusCode.INVALID_ARGUMENT", call
    for call in ("no trace", "no log settings", "no shared memory", "no shared memory of a GPU"):
        assert of_server[call][0] == "StatusCode.UNIMPLEMENTED", call


@needs_triton
def test_our_client_and_tritonclient_can_be_imported_together() -> None:
    program = [sys.executable, "-c", "import prelunet.evaluator.client, tritonclient.grpc, tritonclient.grpc.aio"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def buf(*arguments: str, typed: str = "") -> str:
    assert BUF is not None
    done = subprocess.run([BUF, *arguments], input=typed, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def curl(server: RunningServer, method: str, request: Any) -> Any:
    """Call a method with buf curl, which gets the message types by reflection."""
    url = f"http://{server.address}/{method}"
    flags = ["--protocol", "grpc", "--http2-prior-knowledge"]
    return json.loads(buf("curl", *flags, "--data", "@-", url, typed=json.dumps(request)))


@needs_buf
def test_buf_curl_classifies_over_both_protocols_by_reflection(server: RunningServer) -> None:
    session = FakeSession()
    (alone,) = classify_images(session, [decode_rgb(IMAGE)], build_protocol("center", session.contract))
    image = base64.b64encode(IMAGE).decode()
    tensor = {"name": "images", "datatype": "BYTES", "shape": [1], "contents": {"bytesContents": [image]}}
    request = {"modelName": "six", "inputs": [tensor], "parameters": {"protocol": {"stringParam": "center"}}}
    answer = curl(server, "inference.GRPCInferenceService/ModelInfer", request)
    same(answer["outputs"][0]["contents"]["fp32Contents"], alone.scores)
    ours = curl(server, "prelunet.v1.PreluNetService/Classify", {"image": image, "protocol": "center"})
    assert ours["predictions"][0]["classIndex"] == alone.top(1)[0][0]


@needs_buf
def test_the_proto_files_pass_buf_lint() -> None:
    assert buf("lint", str(ROOT / "proto")) == ""
