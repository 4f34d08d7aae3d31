"""What bad HTTP requests are answered, and that the next one works."""

import base64
import gc
import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from prelunet.evaluator.serving.http.listener import Connection
from prelunet.evaluator.serving.options import ServerLimits
from tests.helpers.fakes import FakeSession, fake_contract
from tests.serving.http.http_calls import IMAGE, ON, client_to, error_in, raw_call, read_response, request
from tests.serving.serving_harness import RunningServer, eventually, running_server

MIB = 2**20
INFER = "POST /v2/models/six/infer"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    sessions = {"six": FakeSession(), "three": FakeSession(fake_contract(classes=3), seed=1)}
    with running_server(http=ON, **sessions) as running:
        yield running


def with_length(line: str, body: bytes, *headers: str) -> bytes:
    return request(line, f"Content-Length: {len(body)}", *headers, body=body)


def infer(body: object, *headers: str) -> bytes:
    return with_length(INFER, body if isinstance(body, bytes) else json.dumps(body).encode(), *headers)


def tensor(**changes: object) -> dict[str, object]:
    """Return a valid request of the Open Inference Protocol, with changes to its input."""
    images = [base64.b64encode(IMAGE).decode()]
    return {"inputs": [{"name": "images", "shape": [1], "datatype": "BYTES", "data": images, **changes}]}


def form(*parts: bytes, end: bytes = b"--x--\r\n") -> bytes:
    """Return the request of a form with these parts."""
    body = b"".join(b"--x\r\n" + part + b"\r\n" for part in parts) + end
    return with_length(CLASSIFY, body, "Content-Type: multipart/form-data; boundary=x")


CLASSIFY = "POST /v1/classify?model=six"
FILE = b'Content-Disposition: form-data; name="image"; filename="photo.png"\r\n\r\n' + IMAGE
BAD = {
    "an unknown path": (request("GET /v3"), 404),
    "a trailing slash": (request("GET /v1/models/"), 404),
    "another method": (request("GET /v1/classify"), 405),
    "a method that does not exist": (request("BREW /v1/models"), 405),
    "no HTTP at all": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "no Host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "two Hosts": (request("GET /v1/models", "Host: localhost"), 400),
    "a Host of somebody else": (b"GET /v1/models HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", 421),
    "a header without a name": (request("GET /v1/models", ": x"), 400),
    "a folded header": (request("GET /v1/models", "X: 1", " 2", "X y: z"), 400),
    "a head of 32 KiB": (request("GET /v1/models", f"X: {'x' * 2**15}"), 431),
    "a head of 128 KiB": (request("GET /v1/models", f"X: {'x' * 2**17}"), 400),
    "a body of 100 MB": (request(CLASSIFY, f"Content-Length: {100 * MIB}"), 413),
    "a body of 10^30 bytes": (request(CLASSIFY, f"Content-Length: 1{'0' * 30}"), 400),
    "a negative length": (request(CLASSIFY, "Content-Length: -1"), 400),
    "two lengths": (request(CLASSIFY, "Content-Length: 3", "Content-Length: 4", body=b"abcd"), 400),
    "a length and chunks": (
        request(CLASSIFY, "Content-Length: 4", "Transfer-Encoding: chunked", body=b"0\r\n\r\nGET /v1/models"),
        400,
    ),
    "another transfer encoding": (request(CLASSIFY, "Transfer-Encoding: gzip, chunked"), 400),
    "a chunk without a size": (request(CLASSIFY, "Transfer-Encoding: chunked", body=b"xyz\r\n"), 400),
    "compressed with something else": (with_length(CLASSIFY, b"abc", "Content-Encoding: br"), 415),
    "compressed and damaged": (with_length(CLASSIFY, b"abc", "Content-Encoding: gzip"), 400),
    "no form, although it is called one": (
        with_length(CLASSIFY, IMAGE, "Content-Type: multipart/form-data; boundary=x"),
        400,
    ),
    "a form without parts": (form(), 400),
    "a form with two files": (form(FILE, FILE), 400),
    "a form with a field": (form(FILE, b'Content-Disposition: form-data; name="top_k"\r\n\r\n3'), 400),
    "a form whose file has another name": (form(FILE.replace(b'"image"', b'"file"')), 400),
    "a form with a text in place of the file": (form(FILE.replace(b"; filename", b"; x")), 400),
    "a form whose file is no image": (form(FILE.replace(IMAGE, b"no image")), 400),
    "a form that is cut off": (form(FILE, end=b""), 400),
    "a part without headers": (form(b"\r\n" + IMAGE), 400),
    "a part with 64 KiB of headers": (form(b"X: y\r\n" * 2**13 + FILE), 400),
    "no image": (with_length(CLASSIFY, b"no image"), 400),
    "no body": (request(CLASSIFY), 400),
    "an unknown model": (with_length("POST /v1/classify?model=nine", IMAGE), 404),
    "no model, although there are several": (with_length("POST /v1/classify", IMAGE), 404),
    "an unknown protocol": (with_length(f"{CLASSIFY}&protocol=best", IMAGE), 400),
    "an unknown parameter": (with_length(f"{CLASSIFY}&topk=3", IMAGE), 400),
    "a parameter twice": (with_length(f"{CLASSIFY}&top_k=3&top_k=3", IMAGE), 400),
    "a parameter that is no number": (with_length(f"{CLASSIFY}&top_k=all", IMAGE), 400),
    "top_k of 2^40": (with_length(f"{CLASSIFY}&top_k={2**40}", IMAGE), 400),
    "another kind of heat map": (with_length(f"{CLASSIFY}&heatmap=true", IMAGE), 400),
    "no timeout": (with_length(CLASSIFY, IMAGE, "x-request-timeout: 0"), 400),
    "a timeout that is not a number": (with_length(CLASSIFY, IMAGE, "x-request-timeout: nan"), 400),
    "too little time": (with_length(CLASSIFY, IMAGE, "x-request-timeout: 0.0000001"), 504),
    "a path out of the models": (request("GET /v2/models/../../etc/passwd"), 404),
    "an encoded path out of the models": (request("GET /v2/models/..%2F..%2Fetc%2Fpasswd"), 404),
    "two dots as a model": (request("GET /v2/models/.."), 404),
    "NUL in a model's name": (request("GET /v2/models/six%00"), 404),
    "an unknown version": (request("GET /v2/models/six/versions/2"), 404),
    "readiness of an unknown model": (request("GET /v2/models/nine/ready"), 404),
    "no JSON": (infer(b"images"), 400),
    "JSON of another kind": (infer([]), 400),
    "an unknown field": (infer({**tensor(), "model": "six"}), 400),
    "JSON that is deeply nested": (infer(b'{"inputs":' + b"[" * 900 + b"]" * 900 + b"}"), 400),
    "JSON of a hundred thousand tensors": (infer({"inputs": tensor()["inputs"] * 2 + [{}] * 100_000}), 400),
    "another input": (infer(tensor(name="image")), 400),
    "another type": (infer(tensor(datatype="FP32")), 400),
    "a shape that is too large": (infer(tensor(shape=[2])), 400),
    "a shape of 2^70": (infer(tensor(shape=[2**70])), 400),
    "a negative shape": (infer(tensor(shape=[-1])), 400),
    "neither base64 nor binary": (infer(tensor(data=["?"])), 400),
    "no data": (infer(tensor(data=None)), 400),
    "two kinds of data": (infer(tensor(parameters={"binary_data_size": 3})), 400),
    "a binary size beyond the body": (infer(tensor(data=None, parameters={"binary_data_size": 3})), 400),
    "a binary size of another type": (infer(tensor(data=None, parameters={"binary_data_size": True})), 400),
    "a length of JSON beyond the body": (infer(tensor(), f"Inference-Header-Content-Length: {MIB}"), 400),
    "a length of JSON that is no number": (infer(tensor(), "Inference-Header-Content-Length: -1"), 400),
    "bytes after the binary data": (infer(b'{"inputs":[]}123', "Inference-Header-Content-Length: 13"), 400),
    "a parameter of 2^70": (infer({**tensor(), "parameters": {"timeout": 2**70}}), 400),
    "an unknown output": (infer({**tensor(), "outputs": [{"name": "logits"}]}), 400),
    "classification of 2^40": (
        infer({**tensor(), "outputs": [{"name": "scores", "parameters": {"classification": 2**40}}]}),
        400,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_its_status_and_the_next_one_works(server: RunningServer, name: str) -> None:
    sent, status = BAD[name]
    found, headers, body = raw_call(server, sent)
    assert (found, headers["content-type"]) == (status, "application/json")
    assert len(error_in(body)) > 10
    assert b"/secret" not in body
    if found == 405:
        assert headers["allow"]
    with client_to(server) as client:
        assert client.post("/v1/classify?model=six", content=IMAGE).json()["predictions"]


def test_a_wrong_form_is_answered_with_the_right_one(server: RunningServer) -> None:
    for name in (each for each in BAD if each.startswith("a form with")):
        assert "curl -F image=@photo.jpg" in error_in(raw_call(server, BAD[name][0])[2]), name


def test_errors_have_the_code_the_reason_and_the_id_of_the_request(server: RunningServer) -> None:
    with client_to(server, headers={"x-request-id": "photo.7"}) as client:
        failed = client.post("/v1/classify?model=six", content=b"no image")
        assert {key: value for key, value in failed.json().items() if key != "error"} == {
            "code": "INVALID_ARGUMENT",
            "reason": "IMAGE_ERROR",
            "request_id": "photo.7",
        }
        assert failed.headers["x-request-id"] == "photo.7"
        assert client.post("/v2/models/six/infer").json().keys() == {"error"}
        forged = client.get("/v1/models", headers={"x-request-id": "two words"})
        assert forged.headers["x-request-id"] != "two words"


def test_a_chunked_body_without_a_length_is_classified_or_refused_above_the_limit(server: RunningServer) -> None:
    with client_to(server) as client:
        assert client.post("/v1/classify?model=six", content=iter([IMAGE[:100], IMAGE[100:]])).status_code == 200
    chunk = b"100000\r\n" + b"x" * MIB + b"\r\n"
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request(CLASSIFY, "Transfer-Encoding: chunked"))
        for _ in range(65):
            connection.sendall(chunk)
        assert read_response(connection)[0] == 413


def test_a_large_body_that_is_refused_unread_does_not_hide_the_response(server: RunningServer) -> None:
    body = b"x" * 70 * MIB
    assert raw_call(server, with_length(CLASSIFY, body))[0] == 413


def test_a_client_that_waits_for_leave_to_send_gets_it_or_the_refusal(server: RunningServer) -> None:
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request(CLASSIFY, f"Content-Length: {len(IMAGE)}", "Expect: 100-continue"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(IMAGE)
        assert read_response(connection)[0] == 200
    assert raw_call(server, request(CLASSIFY, f"Content-Length: {100 * MIB}", "Expect: 100-continue"))[0] == 413


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            with_length(CLASSIFY, IMAGE, "x-request-id: a")
            + request("GET /v3", "x-request-id: b")
            + with_length(CLASSIFY, b"no image", "x-request-id: c", "Connection: close")
        )
        received = b""
        while part := connection.recv(2**16):
            received += part
    ids = [line.split(b": ")[1] for line in received.split(b"\r\n") if line.startswith(b"x-request-id")]
    assert ids == [b"a", b"b", b"c"]
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"400"]


def test_head_is_get_without_the_body(server: RunningServer) -> None:
    with client_to(server) as client:
        found, alone = client.get("/v1/models"), client.head("/v1/models")
        assert (alone.status_code, alone.content) == (200, b"")
        assert alone.headers["content-length"] == found.headers["content-length"]


SLOW = ServerLimits(handshake_timeout=0.3, message_timeout=0.3)


def test_slow_heads_are_cut_off_and_slow_bodies_are_refused() -> None:
    with running_server(http=ON, server_limits=SLOW, six=FakeSession()) as server:
        assert raw_call(server, b"")[0] == 0
        assert raw_call(server, b"GET /v1/mod")[0] == 0
        status, _, body = raw_call(server, request("POST /v1/classify", "Content-Length: 3", body=b"x"))
        assert (status, "did not arrive within 0.3 s" in error_in(body)) == (504, True)
        host, _, port = server.http.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:  # after a good request, too
            connection.sendall(request("GET /v1/models"))
            assert read_response(connection)[0] == 200
            connection.sendall(b"GET /v1/mod")
            begun = time.monotonic()
            assert connection.recv(1) == b""
            assert time.monotonic() - begun < 10
        eventually(lambda: server.metric("prelunet_http_connections") == 0)


def test_at_the_limit_of_connections_the_oldest_idle_one_makes_room() -> None:
    with running_server(http=ON, server_limits=ServerLimits(max_connections=4), six=FakeSession()) as server:
        host, _, port = server.http.rpartition(":")
        idle = [socket.create_connection((host, int(port)), timeout=20) for _ in range(4)]
        eventually(lambda: server.metric("prelunet_http_connections") == 4)
        with client_to(server) as client:
            assert client.get("/v1/models").status_code == 200
            assert idle[0].recv(1) == b""
        for each in idle:
            each.close()


def test_nothing_is_kept_of_connections_that_clients_reset(server: RunningServer) -> None:
    def kept() -> int:
        gc.collect()
        return sum(type(each) is Connection for each in gc.get_objects())

    before, (host, _, port) = kept(), server.http.rpartition(":")
    for _ in range(10):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(request("GET /v1/models"))
            assert read_response(connection)[0] == 200
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
    eventually(lambda: kept() <= before)
