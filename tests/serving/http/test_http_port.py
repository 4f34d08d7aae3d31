"""The HTTP port gives the answers of gRPC, within the same limits."""

import asyncio
import base64
import gc
import importlib.util
import ipaddress
import json
import logging
import socket
import ssl
import struct
import subprocess
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import grpc
import httpx
import jsonschema
import msgspec
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response
from starlette.routing import Route

from prelunet.evaluator.errors import ContractError, DeviceLost, EnvironmentFault, Interrupted, OutOfMemory
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.access import SCOPES, AccessControl, create_token
from prelunet.evaluator.serving.answers import list_models_response
from prelunet.evaluator.serving.arriving import process_memory
from prelunet.evaluator.serving.calls import CallsInFlight
from prelunet.evaluator.serving.http import routes
from prelunet.evaluator.serving.http.door import HttpCall, HttpDoor
from prelunet.evaluator.serving.http.listener import ConnectionLimits, Listener
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability.logs import JsonFormatter
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import HttpOptions, ModelFile, ServerLimits
from prelunet.evaluator.serving.proxies import TrustedProxies
from prelunet.evaluator.serving.repository import Version
from prelunet.evaluator.serving.server import Server
from prelunet.evaluator.serving.watched_files import Certificates
from tests.helpers.fakes import FakeSession
from tests.helpers.tls_files import TLS, install_pair, tls_options, write_tokens
from tests.serving.event_loop import async_test, until
from tests.serving.http.http_calls import IMAGE, ON, client_to, raw_call, read_response, request
from tests.serving.serving_harness import GatedSession, RunningServer, eventually, png, running_server

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(http=ON, six=FakeSession()) as running:
        yield running


def classified(server: RunningServer, **changes: Any) -> pb.ClassifyResponse:
    """Return the answer over gRPC."""
    with grpc.insecure_channel(server.address) as channel:
        return pb_grpc.PreluNetServiceStub(channel).Classify(pb.ClassifyRequest(image=IMAGE, **changes), timeout=30)


def as_json(message: Message) -> dict[str, Any]:
    """Return protobuf's own JSON form of a message, with the names and all fields of the proto file."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


@pytest.mark.parametrize(
    ("query", "fields"),
    [
        ("", {}),
        ("?model=six&protocol=center&top_k=2", {"model": "six", "protocol": "center", "top_k": 2}),
        ("?scales=33,45&mirror=false&apply_exif=true", {"scales": [33, 45], "mirror": False, "apply_exif": True}),
        ("?heatmap=png&protocol=dense-40", {"heatmap": True, "protocol": "dense-40"}),
        ("?heatmap=maps&protocol=dense-40-60", {"maps": True, "protocol": "dense-40-60"}),
        ("?heatmap=maps&protocol=center", {"maps": True, "protocol": "center"}),
    ],
)
def test_classify_answers_in_the_json_form_of_the_answer_over_grpc(
    server: RunningServer, query: str, fields: dict[str, Any]
) -> None:
    with client_to(server) as client:
        answer = client.post(f"/v1/classify{query}", content=IMAGE)
    assert answer.headers["content-type"] == "application/json"
    found, expected = answer.json(), as_json(classified(server, **fields))
    times, expected_times = found.pop("timings"), expected.pop("timings")
    assert found == expected
    assert times.keys() == expected_times.keys()
    assert times["total_seconds"] > 0


@pytest.mark.parametrize("name", ["photo.png", 'two "words".png', "größe.png"])
def test_a_form_is_answered_as_the_file_in_it(server: RunningServer, name: str) -> None:
    with client_to(server) as client:
        plain = client.post("/v1/classify?protocol=center", content=IMAGE).json()
        sent = client.post("/v1/classify?protocol=center", files={"image": (name, IMAGE, "image/png")})
        described = client.get("/openapi.json").json()["paths"]["/v1/classify"]["post"]["requestBody"]["content"]
    assert sent.json()["predictions"] == plain["predictions"]
    assert described.keys() == {"*/*", "multipart/form-data", "application/json"}
    assert described["multipart/form-data"]["schema"] == {"$ref": "#/components/schemas/ClassifyForm"}


def test_json_with_an_image_in_base64_is_answered_as_the_image(server: RunningServer) -> None:
    image = base64.b64encode(IMAGE).decode()
    with client_to(server) as client:
        plain = client.post("/v1/classify?protocol=center", content=IMAGE).json()
        sent = client.post("/v1/classify?protocol=center", json={"image": image})
        wrong = [
            client.post("/v1/classify", json=body) for body in ({"image": image[1:]}, {"picture": image}, {}, [image])
        ]
    assert sent.json()["predictions"] == plain["predictions"]
    for each in wrong:
        assert each.status_code == 400
        assert 'this JSON is not {"image": "…"} with the encoded image in base64' in each.json()["error"]


@pytest.mark.parametrize("text", ["false", "False", "FALSE", "0"])
def test_a_boolean_in_a_query_may_be_written_in_any_case(server: RunningServer, text: str) -> None:
    with client_to(server) as client:
        answer = client.post(f"/v1/classify?protocol=dense-40&mirror={text}", content=IMAGE)
        wrong = client.post("/v1/classify?mirror=no", content=IMAGE)
    assert answer.json()["protocol"]["mirror"] is False
    assert wrong.status_code == 400
    assert "true or false is expected - at `$.mirror`" in wrong.json()["error"]


def test_every_response_has_the_date_of_the_server(server: RunningServer) -> None:
    with client_to(server) as client:
        answers = [client.get("/v1/models"), client.get("/nothing"), client.post("/v1/classify", content=b"no image")]
    _, of_no_http, _ = raw_call(server, b"no HTTP\r\n\r\n")
    now = datetime.now(UTC)
    for headers in (*(answer.headers for answer in answers), of_no_http):
        assert abs(now - parsedate_to_datetime(headers["date"])) < timedelta(seconds=60)  # of a slow machine


def test_an_image_with_too_many_bytes_gets_413() -> None:
    limits = DecodeLimits(max_bytes=len(IMAGE) - 1)
    with running_server(limits, http=ON, six=FakeSession()) as server, client_to(server) as client:
        answer = client.post("/v1/classify", content=IMAGE)
    assert answer.status_code == 413
    assert answer.json()["reason"] == "IMAGE_TOO_LARGE"
    assert f"{len(IMAGE)} bytes are more than the limit" in answer.json()["error"]


def test_the_models_are_described_in_the_json_form_of_grpc(server: RunningServer) -> None:
    with client_to(server) as client, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.PreluNetServiceStub(channel)
        assert client.get("/v1/models").json() == as_json(stub.ListModels(pb.ListModelsRequest()))
        described = as_json(stub.GetModel(pb.GetModelRequest(name="six")).model)
        for name in ("six", "six/1"):
            assert client.get(f"/v1/models/{name}").json() == described
        assert client.get("/v1/models/nine").status_code == 404


def test_the_list_of_models_says_in_the_json_form_of_grpc_what_is_wrong_with_others() -> None:
    message = pb.ListModelsResponse(problems=[pb.VersionProblem(name="six", version=2, reason="damaged")])
    listed = list_models_response([], {Version("six", 2): "damaged"})
    assert msgspec.to_builtins(listed) == as_json(message)


@pytest.mark.parametrize("tokens", [False, True])
def test_every_answer_and_error_of_every_route_has_the_schema_of_the_description(tmp_path: Path, tokens: bool) -> None:
    write_tokens(tmp_path / "tokens.toml", ("alice", ["evaluate"]))
    access = AccessControl(tmp_path / "tokens.toml") if tokens else None
    infer = json.dumps(infer_body()).encode()
    good = {"classify": IMAGE, "modelInfer": infer, "modelInferOfVersion": infer}
    with running_server(http=ON, access=access, six=FakeSession()) as server, client_to(server) as client:
        description = client.get("/openapi.json").json()
        described = {(path, method): each for path, of in description["paths"].items() for method, each in of.items()}

        def check(path: str, method: str, **options: Any) -> int:
            answer = client.request(method, path.format(**{"name": "six", "version": "1", **names}), **options)
            responses = described[path, method]["responses"]
            media_type = answer.headers["content-type"]
            schema = responses[str(answer.status_code)]["content"][media_type]["schema"]
            if media_type == "application/json":
                jsonschema.validate(answer.json(), {**schema, "components": description["components"]})
                if isinstance(answer.json(), dict):
                    with pytest.raises(jsonschema.ValidationError):
                        jsonschema.validate(
                            {**answer.json(), "extra": 1}, {**schema, "components": description["components"]}
                        )
            return answer.status_code

        for (path, method), operation in described.items():
            names: dict[str, str] = {}
            fixed = "RepositoryModel" in operation["summary"]  # the models of this server are
            expected = 401 if "401" in operation["responses"] and tokens else 400 if fixed else 200
            assert check(path, method, content=good.get(operation["operationId"], b"")) == expected, path
            assert check(path, method, headers={"x-request-timeout": "0"}) in {400, expected}, path
            if method == "post":
                assert check(path, method, headers={"Origin": "http://evil.example"}) == 403
                assert check(path, method, content=b"x") in {400, expected}, path
            if "{name}" in path and not tokens and not fixed:
                names = {"name": "nine"}
                assert check(path, method, content=good.get(operation["operationId"], b"")) == 404


def test_the_description_names_each_operation_once_with_its_parameters_and_bodies(server: RunningServer) -> None:
    with client_to(server) as client:
        description = client.get("/openapi.json").json()
    operations = [each for of in description["paths"].values() for each in of.values()]
    assert len({each["operationId"] for each in operations}) == len(operations) == 22
    classify = description["paths"]["/v1/classify"]["post"]
    parameters = {each["name"]: each["schema"] for each in classify["parameters"]}
    assert parameters.keys() == {field.name for field in pb.ClassifyRequest.DESCRIPTOR.fields} - {"image", "maps"}
    assert {schema.get("type", "enum") for schema in parameters.values()} == {
        "string", "integer", "boolean", "array", "enum",
    }  # fmt: skip
    assert {"400", "401", "403", "404", "413", "429", "500", "503", "504"} < classify["responses"].keys()
    infer = description["paths"]["/v2/models/{name}/infer"]["post"]
    schema = {**infer["requestBody"]["content"]["application/json"]["schema"], "components": description["components"]}
    jsonschema.validate(infer_body(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"inputs": [{"name": "images"}]}, schema)
    probe = description["paths"]["/v2/health/ready"]["get"]["responses"]
    assert "401" not in probe
    assert probe["503"]["content"] == probe["200"]["content"]
    jsonschema.Draft202012Validator.check_schema({"$defs": description["components"]["schemas"]})


@pytest.mark.skipif(importlib.util.find_spec("geventhttpclient") is None, reason="pip install '.[dev]' has the client")
def test_tritonclient_gets_over_http_what_it_gets_over_grpc_to_the_bit(server: RunningServer, tmp_path: Path) -> None:
    files = [tmp_path / f"{place}.png" for place in range(2)]
    for place, file in enumerate(files):
        file.write_bytes(png(40 + place, 57, seed=place))
    program = [
        sys.executable,
        "-m",
        "tests.serving.http.triton_http_calls",
        server.address,
        server.http,
        *map(str, files),
    ]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    over_http, over_grpc = results["http"], results["grpc"]
    assert {over_http[name] for name in ("json", "gzip", "deflate")} == {over_grpc["scores"]}
    assert (over_http["json classes"], over_http["id"]) == (over_grpc["classes"], "photo 7")
    assert over_grpc["ready"] == [True, True, True, False]
    assert len(over_grpc["errors"]) == 4
    for key in ("scores", "type", "classes", "ready", "errors", "server", "inputs", "counted"):
        assert over_http[key] == over_grpc[key], key
    assert over_http["config"]["input"][0]["data_type"] == over_grpc["config"]["input"][0]["data_type"]
    assert [(each["name"], each["state"]) for each in over_http["index"]] == [("six", "READY")]


# One core: limits, tokens, deadlines.


def test_calls_over_http_fill_the_calls_in_flight_of_grpc_from_the_same_address() -> None:
    session = GatedSession()
    with (
        running_server(http=ON, server_limits=ServerLimits(max_calls=4), six=session) as server,
        client_to(server) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        calls = [pool.submit(client.post, "/v1/classify?protocol=center", content=IMAGE) for _ in range(4)]
        eventually(lambda: server.metric("prelunet_calls_now") == 4)
        with pytest.raises(grpc.RpcError, match="already has 4 calls in flight"):
            classified(server)
        refused = client.post("/v1/classify", content=IMAGE)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["reason"] == "OVERLOADED"
        assert client.get("/v2/health/ready").status_code == 200
        session.gate.set()
        assert [call.result(30).status_code for call in calls] == [200] * 4
        eventually(lambda: server.metric("prelunet_calls_now") == 0)


def test_unfinished_bodies_are_refused_in_a_process_beyond_its_memory() -> None:
    limits = ServerLimits(arriving_bytes=1)  # so each client may always have one
    with running_server(
        http=ON, server_limits=limits, max_memory=process_memory() + 2**25, six=FakeSession()
    ) as server:
        host, _, port = server.http.rpartition(":")
        half, head = b"x" * 40 * 2**20, request("POST /v1/classify", f"Content-Length: {60 * 2**20}")
        connections = [socket.create_connection((host, int(port)), timeout=30) for _ in range(4)]
        for each in connections:
            each.sendall(head + half)
        eventually(lambda: server.metric("prelunet_refusals_total", model="", reason="arriving") >= 1)
        for each in connections:
            each.close()
        eventually(lambda: server.metric("prelunet_calls_now") == 0)


def test_every_route_has_the_scope_of_its_method(tmp_path: Path) -> None:
    classify, evaluate = create_token("a", ["classify"]), create_token("b", ["evaluate"])
    slow = create_token("c", ["classify"], rate=0.01)
    (tmp_path / "tokens.toml").write_text("".join(lines for _, lines in (classify, evaluate, slow)))
    access = AccessControl(tmp_path / "tokens.toml")
    routes = {
        ("GET", "/v2/health/live"): "nothing", ("GET", "/v2/health/ready"): "nothing",
        ("GET", "/v2/models/six/ready"): "nothing", ("GET", "/openapi.json"): "nothing",
        ("GET", "/v2"): "token", ("GET", "/v2/models/six"): "token", ("GET", "/v2/models/six/config"): "token",
        ("GET", "/v2/models/six/stats"): "token", ("GET", "/v2/models/stats"): "token",
        ("POST", "/v2/repository/index"): "token", ("GET", "/v1/models"): "token",
        ("GET", "/v1/models/six"): "token", ("GET", "/"): "nothing",
        ("POST", "/v2/repository/models/six/load"): "admin", ("POST", "/v2/repository/models/six/unload"): "admin",
        ("POST", "/v1/classify"): "classify", ("POST", "/v2/models/six/infer"): "classify",
    }  # fmt: skip
    with running_server(http=ON, access=access, six=FakeSession()) as server, client_to(server) as client:
        for (method, path), required in routes.items():

            def status(secret: str, method: str = method, path: str = path) -> int:
                headers = {"Authorization": secret} if secret else {}
                return client.request(method, path, content=IMAGE, headers=headers).status_code

            assert (status("") == 401) == (required != "nothing"), path
            assert status(f"Bearer {classify[0]}") in ({403} if required == "admin" else {200, 400}), path
            assert (status(f"Bearer {evaluate[0]}") == 403) == (required in {"classify", "admin"}), path
        unknown = client.post("/v1/classify", content=IMAGE)
        assert unknown.headers["www-authenticate"] == "Bearer"
        limited = [client.get("/v1/models", headers={"Authorization": f"Bearer {slow[0]}"}) for _ in range(2)]
        assert [each.status_code for each in limited] == [200, 429]
        assert 50 < int(limited[1].headers["retry-after"]) <= 100


def test_the_log_has_the_token_s_name_and_never_its_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (secret,) = write_tokens(tmp_path / "tokens.toml", ("alice", SCOPES))
    caplog.set_level(logging.DEBUG)
    access = AccessControl(tmp_path / "tokens.toml")
    with running_server(http=ON, access=access, six=FakeSession()) as server, client_to(server) as client:
        headers = {"authorization": f"Bearer {secret}", "x-request-id": "photo-7"}
        assert client.post("/v1/classify?protocol=center", content=IMAGE, headers=headers).status_code == 200
        assert client.get(f"/v1/{secret}", headers=headers).status_code == 404
        assert client.get("/v1/models", headers={"authorization": f"Basic {secret}"}).status_code == 401
        eventually(lambda: len(server.calls_logged(caplog)) == 3)
    lines = [JsonFormatter().format(record) for record in caplog.records if record.name.startswith("prelunet")]
    assert not any(secret in line for line in lines)
    first, *_ = server.calls_logged(caplog)
    assert (first["client"], first["status"], first["model"], first["bytes"]) == (
        "token:alice",
        "OK",
        "six",
        len(IMAGE),
    )


def test_a_client_behind_a_trusted_proxy_is_known_by_its_own_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    proxies = TrustedProxies("x-forwarded-for", (ipaddress.ip_network("127.0.0.0/8"),))
    limits = ServerLimits(proxies=proxies)
    with running_server(http=ON, server_limits=limits, six=FakeSession()) as server, client_to(server) as client:
        assert client.get("/v1/models", headers={"x-forwarded-for": "8.8.8.8, 10.1.2.3"}).status_code == 200
        eventually(lambda: server.calls_logged(caplog))
    (fields,) = server.calls_logged(caplog)
    assert fields["client"] == "ipv4:10.1.2.3"


def test_a_client_that_leaves_cancels_its_call() -> None:
    session = GatedSession()
    with running_server(http=ON, six=session) as server:
        with pytest.raises(httpx.ReadTimeout), client_to(server) as client:
            client.post("/v1/classify?protocol=center", content=IMAGE, timeout=0.5)
        eventually(lambda: server.metric("prelunet_calls_now") == 0)
        labels = {"method": "prelunet.v1.PreluNetService/Classify", "status": "CANCELLED"}
        assert server.metric("prelunet_calls_total", **labels) == 1
        session.gate.set()


def test_an_error_of_ours_is_500_with_the_id_of_the_log_entry_and_without_its_text(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the file /secret/six.onnx is broken")

    monkeypatch.setattr(routes, "classify_response", broken)
    monkeypatch.setattr(routes, "infer_response", broken)
    with client_to(server) as client:
        for path, content in (("/v1/classify", IMAGE), ("/v2/models/six/infer", json.dumps(infer_body()).encode())):
            failed = client.post(path, content=content)
            assert failed.status_code == 500
            assert "secret" not in failed.text
            incident = failed.json()["error"].split()[-1]
            assert any(f"incident {incident}" in record.getMessage() for record in caplog.records)


def infer_body() -> dict[str, Any]:
    """Return a request of the Open Inference Protocol in JSON."""
    images = [base64.b64encode(IMAGE).decode()]
    return {"inputs": [{"name": "images", "shape": [1], "datatype": "BYTES", "data": images}]}


def test_a_request_that_takes_too_long_ends_with_504() -> None:
    session = GatedSession()
    with running_server(http=ON, six=session) as server, client_to(server) as client:
        late = client.post("/v1/classify?protocol=center", content=IMAGE, headers={"x-request-timeout": "0.3"})
        assert (late.status_code, late.json()["code"]) == (504, "DEADLINE_EXCEEDED")
        assert "model" not in late.json()["error"]
        session.gate.set()


def test_the_parameter_timeout_ends_a_call_before_its_header_and_not_after() -> None:
    session = GatedSession()
    with running_server(http=ON, six=session) as server, client_to(server) as client:
        for header, parameter in (("30", 200_000), ("0.2", 30_000_000)):
            body = {**infer_body(), "parameters": {"protocol": "center", "timeout": parameter}}
            late = client.post("/v2/models/six/infer", json=body, headers={"x-request-timeout": header}, timeout=20)
            assert late.status_code == 504
        session.gate.set()


@async_test
async def test_a_response_that_nobody_reads_stays_in_flight_until_its_time_is_over() -> None:
    metrics = Metrics()
    calls = CallsInFlight(ServerLimits(max_calls=4, message_timeout=0.5), metrics)
    door = HttpDoor(calls)

    async def much(_call: HttpCall) -> Response:
        return Response(b"x" * 2**24)  # more than a connection's buffers

    door.router.routes.append(Route("/much", door.endpoint_of("prelunet.v1.PreluNetService/ListModels", much)))
    listener = Listener(door, "127.0.0.1", 0, ConnectionLimits(4), option="--http-port")
    listener.open()
    host, _, port = listener.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1000)
    writer.write(request("GET /much"))
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    assert calls.count == 1
    await until(lambda: not calls.count)
    labels = {"method": "prelunet.v1.PreluNetService/ListModels", "status": "CANCELLED"}
    assert metrics.registry.get_sample_value("prelunet_calls_total", labels) == 1
    writer.close()
    await listener.close_within(1)
    assert not listener.connections


def test_only_own_names_and_addresses_are_accepted_as_host() -> None:
    with running_server(http=HttpOptions(0, ("Flowers.example.org", "*.Svc.example.net")), six=FakeSession()) as server:
        for host, status in {
            "localhost": 200, "127.0.0.1:80": 200, "[::1]:8000": 200, "10.1.2.3": 200, "flowers.example.ORG:1": 200,
            "example.org": 421, "flowers.example.org.evil.com": 421, "localhost.evil.com": 421, "": 421, "[::1": 421,
            "a.svc.example.NET:80": 200, "a.b.svc.example.net": 200, "svc.example.net": 421, "asvc.example.net": 421,
            "a.svc.example.net.evil.com": 421,
        }.items():  # fmt: skip
            sent = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nOrigin: http://evil.com\r\n\r\n".encode()
            found, headers, _ = raw_call(server, sent)
            assert found == status, host
            assert not any(name.startswith("access-control") for name in headers)


def test_a_page_of_another_site_may_change_nothing_and_our_own_pages_and_programs_may() -> None:
    with running_server(http=ON, six=FakeSession()) as server, client_to(server) as client:
        paths = client.get("/openapi.json").json()["paths"]
        posted = [path.format(name="six", version="1") for path, methods in paths.items() if "post" in methods]
        for headers, allowed in (
            ({}, True),
            ({"Origin": f"http://{server.http}"}, True),
            ({"Origin": "https://flowers.example.org", "Sec-Fetch-Site": "same-origin"}, True),  # a proxy changed Host
            ({"Sec-Fetch-Site": "none"}, True),
            ({"Sec-Fetch-Site": "same-site"}, False),
            ({"Sec-Fetch-Site": "cross-site", "Origin": f"http://{server.http}"}, False),
            ({"Origin": "http://evil.example"}, False),
            ({"Origin": "http://127.0.0.1:1"}, False),
            ({"Origin": "null"}, False),  # of a file, or of a frame without an origin
        ):
            for path in posted:
                answer = client.post(path, headers=headers, content=b"x")
                assert (answer.status_code != 403) == allowed, (path, headers)
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert "web page of another site" in answer.json()["error"]


# TLS.


def test_http_uses_the_certificates_and_their_successors(tmp_path: Path) -> None:
    metrics = Metrics()
    certificates = Certificates(tls_options(tmp_path, mutual=True), metrics)
    trusting = ssl.create_default_context(cafile=TLS / "ca.pem")
    with running_server(http=ON, certificates=certificates, six=FakeSession()) as server:
        url = f"https://{server.http}/v1/models"
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http"), trust_env=False)
        with pytest.raises(httpx.TransportError):  # without a certificate of its own
            httpx.get(url, verify=trusting, trust_env=False)
        trusting.load_cert_chain(TLS / "client.pem", TLS / "client.key")
        host, _, port = server.http.rpartition(":")

        def certificate() -> Any:
            with (
                socket.create_connection((host, int(port))) as plain,
                trusting.wrap_socket(plain, server_hostname="localhost") as secured,
            ):
                return secured.getpeercert(binary_form=True)

        with httpx.Client(verify=trusting, trust_env=False) as open_before:
            assert open_before.get(url).status_code == 200
            first = certificate()
            install_pair(tmp_path, "server-2")
            for _ in range(2):
                certificates.files.poll()
            assert certificate() != first
            assert open_before.get(url).status_code == 200


def test_a_client_that_leaves_after_a_large_body_over_tls_cancels_its_call(tmp_path: Path) -> None:
    certificates, session = Certificates(tls_options(tmp_path), Metrics()), GatedSession()
    trusting = ssl.create_default_context(cafile=TLS / "ca.pem")
    with running_server(http=ON, certificates=certificates, six=session) as server:
        url = f"https://{server.http}/v1/classify?protocol=center"
        with pytest.raises(httpx.ReadTimeout):  # reading paused when the last part came: TLS delivers 256 KiB at once
            httpx.post(url, content=png(600, 600), verify=trusting, trust_env=False, timeout=1)
        eventually(lambda: server.metric("prelunet_calls_now") == 0)
        session.gate.set()


def test_nothing_is_kept_of_a_tls_connection_that_is_reset_during_a_call(tmp_path: Path) -> None:
    def kept() -> int:
        gc.collect()
        return sum(type(each) is SSLProtocol for each in gc.get_objects())  # each with 256 KiB

    before = kept()
    certificates, session = Certificates(tls_options(tmp_path), Metrics()), GatedSession()
    trusting = ssl.create_default_context(cafile=TLS / "ca.pem")
    with running_server(http=ON, certificates=certificates, six=session) as server:
        host, _, port = server.http.rpartition(":")
        with (
            socket.create_connection((host, int(port)), timeout=20) as plain,
            trusting.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            secured.sendall(request("POST /v1/classify?protocol=center", f"Content-Length: {len(IMAGE)}", body=IMAGE))
            assert session.entered.wait(20)
            secured.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        eventually(lambda: server.metric("prelunet_calls_now") == 0)
        session.gate.set()
        eventually(lambda: kept() <= before)


def test_handshakes_that_fail_or_never_end_leave_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(tls_options(tmp_path), Metrics())
    limits = ServerLimits(handshake_timeout=0.5)
    with running_server(http=ON, server_limits=limits, certificates=certificates, six=FakeSession()) as server:
        host, _, port = server.http.rpartition(":")
        for sent in (b"", b"\x16\x03", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=20) as client:
                client.sendall(sent)
                while client.recv(100):  # perhaps an alert
                    pass
        eventually(lambda: server.metric("prelunet_http_connections") == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_at_the_limit_of_connections_a_handshake_that_never_ends_makes_room(tmp_path: Path) -> None:
    certificates = Certificates(tls_options(tmp_path), Metrics())
    limits = ServerLimits(max_connections=4)
    with running_server(http=ON, server_limits=limits, certificates=certificates, six=FakeSession()) as server:
        host, _, port = server.http.rpartition(":")
        silent = [socket.create_connection((host, int(port)), timeout=20) for _ in range(4)]
        eventually(lambda: server.metric("prelunet_http_connections") == 4)
        trusting = ssl.create_default_context(cafile=TLS / "ca.pem")
        assert httpx.get(f"https://{server.http}/v1/models", verify=trusting, trust_env=False).status_code == 200
        assert silent[0].recv(1) == b""
        for each in silent:
            each.close()


# Start and end.


def closes(answer: httpx.Response) -> bool:
    """Return whether an answer closes its connection."""
    assert answer.status_code == 200
    return answer.headers.get("connection") == "close"


@async_test
async def test_requests_on_every_connection_made_before_the_port_closes_are_answered() -> None:
    models = Models([(ModelFile("six", Path("six.onnx")), FakeSession())], DecodeLimits())
    server, sent = Server("127.0.0.1", 0, http=ON), request("GET /v1/models")
    await server.start(models)
    url = urlsplit(server.http_url)
    connect = partial(socket.create_connection, (url.hostname, url.port), 20)
    with ExitStack() as stack:
        idle, used, new = [stack.enter_context(connect()) for _ in range(3)]
        for each in (idle, used):
            each.sendall(sent)
            assert (await asyncio.to_thread(read_response, each))[0] == 200
        waiting = [stack.enter_context(connect()) for _ in range(5)]  # for the event loop, which this test holds
        for each in (used, *waiting):
            each.sendall(sent)
        stopping = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0.2)
        with pytest.raises(ConnectionRefusedError):
            connect()
        assert idle.recv(1) == b""
        new.sendall(sent)
        for each in (used, *waiting, new):
            status, headers, _ = await asyncio.to_thread(read_response, each)
            assert (status, headers["connection"], each.recv(1)) == (200, "close", b"")
        assert await stopping == 0
    models.close()


@async_test
async def test_connections_are_refused_while_models_load_and_calls_answered_until_the_port_closes() -> None:
    session = GatedSession()
    server = Server("127.0.0.1", 0, http=ON)
    await server.open()
    async with httpx.AsyncClient(base_url=server.http_url, timeout=30, trust_env=False) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/v2/health/live")
        models = Models([(ModelFile("six", Path("six.onnx")), session)], DecodeLimits())
        await server.start(models)
        assert (await client.get("/v2/health/ready")).status_code == 200
        assert not closes(await client.get("/v1/models"))
        classifying = asyncio.create_task(client.post("/v1/classify?protocol=center", content=IMAGE))
        await until(session.entered.is_set)
        server.set_not_serving()
        for path in ("/v2/health/ready", "/v2/models/six/ready"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()) == (503, {"ready": False})
        assert closes(await client.get("/v1/models"))  # lame duck
        await server.refuse(asyncio.get_running_loop().create_future())
        assert closes(await client.get("/v1/models"))
        stopping = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0.1)
        assert not stopping.done()
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(trust_env=False) as other:
                await other.get(f"{server.http_url}v1/models")
        session.gate.set()
        assert (await classifying).status_code == 200
        assert await stopping == 0
    models.close()


@async_test
async def test_a_call_that_outlasts_the_grace_period_is_cut_off_and_counted() -> None:
    session = GatedSession()
    server = Server("127.0.0.1", 0, http=ON)
    models = Models([(ModelFile("six", Path("six.onnx")), session)], DecodeLimits())
    await server.start(models)
    async with httpx.AsyncClient(base_url=server.http_url, timeout=30, trust_env=False) as client:
        classifying = asyncio.create_task(client.post("/v1/classify?protocol=center", content=IMAGE))
        await until(session.entered.is_set)
        assert await server.stop(0.2) == 1
        with pytest.raises(httpx.TransportError):
            await classifying
    session.gate.set()
    models.close()


@async_test
async def test_a_port_in_use_is_reported_with_a_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=rf"\(--http-port\): port {number} is in use"):
            Server("127.0.0.1", 0, http=HttpOptions(number))


@async_test
async def test_a_port_taken_while_models_load_is_reported_with_a_fix() -> None:
    server = Server("127.0.0.1", 0, http=ON)
    await server.open()
    with (
        socket.create_server(("127.0.0.1", urlsplit(server.http_url).port)),
        pytest.raises(EnvironmentFault, match=r"127.0.0.1:[0-9]+: another program .* Choose another port"),
    ):
        await server.start(Models((), DecodeLimits()))
    await server.stop(0)


def test_a_thousand_calls_at_once_are_all_answered(server: RunningServer) -> None:
    with client_to(server, limits=httpx.Limits(max_connections=50)) as client, ThreadPoolExecutor(50) as pool:
        statuses = [
            call.result() for call in [pool.submit(lambda: client.get("/v1/models").status_code) for _ in range(1000)]
        ]
    assert statuses == [200] * 1000


# Metrics, statuses and documentation.


def test_connections_of_both_ports_are_counted_apart() -> None:
    def counts() -> list[float]:
        return [server.metric(f"prelunet_{port}_connections") for port in ("grpc", "http")]

    with running_server(http=ON, six=FakeSession()) as server:
        eventually(lambda: counts() == [0, 0])
        with ExitStack() as stack:
            for address in (server.address, server.address, server.http):
                host, _, port = address.rpartition(":")
                stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            eventually(lambda: counts() == [2, 1])
        eventually(lambda: counts() == [0, 0])


def test_metrics_have_limits_readiness_and_versions_and_nothing_about_creation(server: RunningServer) -> None:
    with client_to(server) as client:
        assert client.get("/v1/models").status_code == 200
        families = {
            each.name: each for each in text_string_to_metric_families(server.models.metrics.text()[0].decode())
        }
    assert not [name for name in families if name.endswith("_created")]
    limits = {sample.labels["option"]: sample.value for sample in families["prelunet_limits"].samples}
    assert limits == {"max-calls": 2048, "max-connections": 4096, "queue-views": 1024, "queue-bytes": 2**28}
    assert [families[f"prelunet_{name}"].samples[0].value for name in ("ready", "build_info")] == [1, 1]
    assert families["prelunet_http_connections"].samples[0].value >= 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ContractError("/secret/six.onnx outputs NaN"), 500),
        (OutOfMemory("too little memory"), 429),
        (DeviceLost("fails on every input"), 503),
        (Interrupted("model 'six' is no longer served"), 503),
    ],
)
def test_faults_of_the_server_have_the_status_that_makes_clients_try_again_only_where_that_helps(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    monkeypatch.setattr(routes, "classify_response", Mock(side_effect=error))
    with client_to(server) as client:
        failed = client.post("/v1/classify", content=IMAGE)
    assert (failed.status_code, "secret" in failed.text) == (status, False)
