"""What the Python clients of KServe and MLServer sent to a server, as recorded by tools/try_clients.py."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.pb.inference import inference_pb2 as pb
from prelunet.evaluator.protocols import build_protocol
from tests.helpers.fakes import FakeSession
from tests.serving.api.bad_calls import INFER
from tests.serving.api.inference_calls import scores_in
from tests.serving.http.http_calls import ON, client_to
from tests.serving.serving_harness import RunningServer, running_server

DATA = Path(__file__).parents[1] / "data"
RECORDED = [json.loads((DATA / "clients" / f"{name}.json").read_text()) for name in ("kserve", "mlserver")]
CALLS = [pytest.param(call, id=f"{each['package']}: {call['call']}") for each in RECORDED for call in each["calls"]]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(http=ON, demo=FakeSession()) as running:
        yield running


@pytest.fixture(scope="module")
def scores() -> np.ndarray:
    """Return the scores of each image classified alone."""
    (files,) = {tuple(each["images"]) for each in RECORDED}
    session = FakeSession()
    protocol = build_protocol("multi-scale", session.contract)
    images = [decode_rgb((DATA / "hostile" / name).read_bytes()) for name in files]
    return np.stack([classify_images(session, [image], protocol)[0].scores for image in images])


@pytest.mark.parametrize("call", CALLS)
def test_a_recorded_call_gets_the_scores_of_its_images_and_pixels_are_refused_with_what_the_model_takes(
    server: RunningServer, scores: np.ndarray, call: dict[str, Any]
) -> None:
    body = call["text"].encode() if "text" in call else base64.b64decode(call["base64"])
    answered = over_http(server, body, call["headers"]) if "http" in call["call"] else over_grpc(server, body)
    if "pixels" in call["call"]:
        assert "this model takes one input: 'images', datatype BYTES" in answered
    else:
        np.testing.assert_allclose(answered, scores, rtol=1e-5)  # in another batch the fake may add in another order


def over_http(server: RunningServer, body: bytes, headers: dict[str, str]) -> Any:
    """Return the scores, (N, classes), or the text of the error."""
    with client_to(server) as client:
        answer = client.post("/v2/models/demo/infer", content=body, headers=headers)
    if answer.is_error:
        return answer.json()["error"]
    end = int(answer.headers.get("inference-header-content-length", len(answer.content)))
    (output,) = json.loads(answer.content[:end])["outputs"]
    data = np.array(output["data"], np.float32) if "data" in output else np.frombuffer(answer.content[end:], "<f4")
    return data.reshape(output["shape"])


def over_grpc(server: RunningServer, body: bytes) -> Any:
    """Return the same."""
    with grpc.insecure_channel(server.address) as channel:
        try:
            answer = channel.unary_unary(INFER)(body, timeout=60)
        except grpc.RpcError as error:
            return error.details()
    return scores_in(pb.ModelInferResponse.FromString(answer))
