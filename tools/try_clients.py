"""Call a server with the Python client of KServe or of MLServer, and record what it sends for `make test`.

    python3 -m venv kserve && kserve/bin/pip install kserve==0.21.0
    python3 -m venv mlserver && mlserver/bin/pip install mlserver==1.7.1 httpx
    prelunet serve --model demo=model.onnx --http-port 8080
    kserve/bin/python tools/try_clients.py kserve
    mlserver/bin/python tools/try_clients.py mlserver

Their packages conflict with ours. Each call has to get the scores of the first, or an error that names BYTES if it
sends pixels. Writes tests/data/clients/PACKAGE.json, which tests/serving/test_recorded_clients.py sends again.
"""

import argparse
import asyncio
import base64
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np

DATA = Path(__file__).parent.parent / "tests" / "data"
FILES = ("exif-rotated.png", "palette.png")
IMAGES = [(DATA / "hostile" / name).read_bytes() for name in FILES]
BASE64 = [base64.b64encode(image).decode() for image in IMAGES]
PIXELS = np.linspace(0, 1, 75, dtype=np.float32).reshape(1, 3, 5, 5)


class Calls:
    """The calls so far. sent: what was sent by its name; scores: of the first call."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.scores: Any = None

    def record(self, name: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Keep what was sent. headers: over HTTP; body: kept as readable text if it is JSON."""
        over, own = ("grpc", {}) if headers is None else ("http", headers)
        kept = {each: own[each] for each in ("content-type", "inference-header-content-length") if each in own}
        is_json = over == "http" and body.isascii()
        sent = {"text": body.decode()} if is_json else {"base64": base64.b64encode(body).decode()}
        self.sent.append({"call": f"{name}, {over}", "headers": kept, **sent})

    def answered(self, scores: Any) -> None:
        """Check scores, (2, classes)."""
        scores = np.array(scores, np.float32).reshape(2, -1)
        self.scores = scores if self.scores is None else self.scores
        np.testing.assert_allclose(scores, self.scores, rtol=1e-5)
        print(self.sent[-1]["call"], scores.max(axis=1))

    def refused(self, text: str) -> None:
        """Check the error, which only pixels should get."""
        assert "pixels" in self.sent[-1]["call"], text
        assert "BYTES" in text, text
        print(self.sent[-1]["call"], text)


async def kserve(calls: Calls, http: str, address: str) -> None:
    from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
    from kserve.protocol.infer_type import RequestedOutput

    def raw() -> Any:
        tensor = InferInput("images", [2], "BYTES")
        tensor.set_data_from_numpy(np.array(IMAGES, dtype=object))
        return tensor

    binary = {"request_outputs": [RequestedOutput("scores", {"binary_data": True})]}
    pixels = InferInput("input", [*PIXELS.shape], "FP32")
    pixels.set_data_from_numpy(PIXELS, binary_data=False)
    requests = {
        "base64": InferRequest("demo", [InferInput("images", [2], "BYTES", BASE64)], "7"),
        "binary": InferRequest("demo", [raw()], "7"),
        "binary answer": InferRequest("demo", [raw()], "7", **binary),
        "binary answer to all": InferRequest("demo", [raw()], "7", parameters={"binary_data_output": True}),
        "pixels": InferRequest("demo", [pixels], "7"),
    }
    names = iter(requests)

    def record(request: httpx.Request) -> httpx.Request:
        if request.method == "POST":
            calls.record(next(names), request.content, request.headers)
        return request

    client = InferenceRESTClient(RESTConfig(protocol="v2", auth=record))
    for request in requests.values():
        try:
            answer = await client.infer(http, request, model_name="demo")
            calls.answered(answer.outputs[0].as_numpy())
        except httpx.HTTPStatusError as error:
            calls.refused(str(error))
    assert await client.is_server_ready(http)
    assert await client.is_model_ready(http, "demo")
    del requests["base64"]  # only in JSON
    requests["bytes"] = InferRequest("demo", [InferInput("images", [2], "BYTES", IMAGES)], "7")
    async with InferenceGRPCClient(address) as stub:
        for name, request in requests.items():
            calls.record(name, request.to_grpc().SerializeToString())
            try:
                answer = await stub.infer(request)
                calls.answered(answer.outputs[0].as_numpy())
            except grpc.RpcError as error:
                calls.refused(error.details())
        assert await stub.is_model_ready("demo")


async def mlserver(calls: Calls, http: str, address: str) -> None:
    from mlserver.codecs import Base64Codec, NumpyCodec, StringCodec
    from mlserver.codecs.string import StringRequestCodec
    from mlserver.grpc import converters
    from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub
    from mlserver.types import InferenceRequest, InferenceResponse, RequestOutput

    whole = StringRequestCodec.encode_request(BASE64)
    whole.inputs[0].name = "images"
    requests = {
        "Base64Codec": InferenceRequest(inputs=[Base64Codec.encode_input("images", IMAGES)]),
        "StringCodec": InferenceRequest(id="7", inputs=[StringCodec.encode_input("images", BASE64)]),
        "StringRequestCodec": whole,
        "an output": InferenceRequest(
            inputs=[Base64Codec.encode_input("images", IMAGES)], outputs=[RequestOutput(name="scores")]
        ),
        "pixels": InferenceRequest(inputs=[NumpyCodec.encode_input("images", PIXELS)]),
    }
    for name, request in requests.items():
        for nulls in (False, True):
            text = request.model_dump_json(exclude_none=not nulls, exclude_unset=not nulls)
            answer = httpx.post(f"{http}/v2/models/demo/infer", content=text)
            calls.record(f"{name}{' with nulls' * nulls}", text.encode(), answer.request.headers)
            if answer.is_error:
                calls.refused(answer.text)
            else:
                calls.answered(NumpyCodec.decode_output(InferenceResponse(**answer.json()).outputs[0]))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for name, request in requests.items():
            for raw in (False, True):  # raw takes the data out of the request
                message = converters.ModelInferRequestConverter.from_types(request, "demo", "", use_raw=raw)
                calls.record(f"{name}{' raw' * raw}", message.SerializeToString())
                try:
                    answer = converters.ModelInferResponseConverter.to_types(await stub.ModelInfer(message))
                    calls.answered(NumpyCodec.decode_output(answer.outputs[0]))
                except grpc.RpcError as error:
                    calls.refused(error.details())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=["kserve", "mlserver"])
    parser.add_argument("--http", default="http://127.0.0.1:8080")
    parser.add_argument("--grpc", default="127.0.0.1:50051")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]  # kserve parses them, too, when it is imported
    calls = Calls()
    asyncio.run({"kserve": kserve, "mlserver": mlserver}[options.package](calls, options.http, options.grpc))
    version = importlib.metadata.version(options.package)
    recorded = {"package": f"{options.package} {version}", "images": FILES, "calls": calls.sent}
    (DATA / "clients" / f"{options.package}.json").write_text(json.dumps(recorded, indent=1) + "\n")
