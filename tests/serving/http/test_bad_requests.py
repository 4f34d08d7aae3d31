"""The table of HTTP in tests/serving/bad-calls.md, and that the next request works."""

import base64
import gc
import gzip
import json
import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.serving.http.inference_json import parse_infer_request
from prelunet.evaluator.serving.http.listener import Connection
from prelunet.evaluator.serving.inference import check_request
from prelunet.evaluator.serving.options import HttpOptions, ServerLimits
from tests.helpers.bad_calls_page import documented
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
SECOND = b"0\r\n\r\n" + request("GET /v1/models")  # the end of chunks, and what should not be taken for a request
ZEROS = gzip.compress(b"\0" * 200 * MIB, 1)


def chunked(body: bytes, *headers: str) -> bytes:
    return request(CLASSIFY, "Transfer-Encoding: chunked", *headers, body=body)


BAD = {
    "an unknown path": request("GET /v3"),
    "a trailing slash": request("GET /v1/models/"),
    "another method": request("GET /v1/classify"),
    "a method that does not exist": request("BREW /v1/models"),
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no Host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "two Hosts": request("GET /v1/models", "Host: localhost"),
    "a Host of somebody else": b"GET /v1/models HTTP/1.1\r\nHost: evil.example:80\r\n\r\n",
    "a page of another site": with_length(CLASSIFY, IMAGE, "Origin: http://evil.example"),
    "a page of a site without an address": with_length(CLASSIFY, IMAGE, "Origin: http://["),
    "a header without a name": request("GET /v1/models", ": x"),
    "a folded header": request("GET /v1/models", "X: 1", " 2", "X y: z"),
    "a head of 32 KiB": request("GET /v1/models", f"X: {'x' * 2**15}"),
    "a head of 128 KiB": request("GET /v1/models", f"X: {'x' * 2**17}"),
    "a body of 100 MB": request(CLASSIFY, f"Content-Length: {100 * MIB}"),
    "a body of 10^30 bytes": request(CLASSIFY, f"Content-Length: 1{'0' * 30}"),
    "a negative length": request(CLASSIFY, "Content-Length: -1"),
    "two lengths": request(CLASSIFY, "Content-Length: 3", "Content-Length: 4", body=b"abcd"),
    "a length and chunks": request(CLASSIFY, "Content-Length: 4", "Transfer-Encoding: chunked", body=SECOND),
    "another transfer encoding": request(CLASSIFY, "Transfer-Encoding: gzip, chunked", body=SECOND),
    "a chunk without a size": request(CLASSIFY, "Transfer-Encoding: chunked", body=b"xyz\r\n"),
    "compressed with something else": with_length(CLASSIFY, b"abc", "Content-Encoding: br"),
    "compressed and damaged": with_length(CLASSIFY, b"abc", "Content-Encoding: gzip"),
    "no form, although it is called one": with_length(
        CLASSIFY, IMAGE, "Content-Type: multipart/form-data; boundary=x"
    ),
    "a form without parts": form(),
    "a form with two files": form(FILE, FILE),
    "a form with a field": form(FILE, b'Content-Disposition: form-data; name="top_k"\r\n\r\n3'),
    "a form whose file has another name": form(FILE.replace(b'"image"', b'"file"')),
    "a form with a text in place of the file": form(FILE.replace(b"; filename", b"; x")),
    "a form whose file is no image": form(FILE.replace(IMAGE, b"no image")),
    "a form that is cut off": form(FILE, end=b""),
    "a part without headers": form(b"\r\n" + IMAGE),
    "a part with 64 KiB of headers": form(b"X: y\r\n" * 2**13 + FILE),
    "no image": with_length(CLASSIFY, b"no image"),
    "no body": request(CLASSIFY),
    "an unknown model": with_length("POST /v1/classify?model=nine", IMAGE),
    "no model, although there are several": with_length("POST /v1/classify", IMAGE),
    "an unknown protocol": with_length(f"{CLASSIFY}&protocol=best", IMAGE),
    "an unknown parameter": with_length(f"{CLASSIFY}&topk=3", IMAGE),
    "a parameter twice": with_length(f"{CLASSIFY}&top_k=3&top_k=3", IMAGE),
    "a parameter that is no number": with_length(f"{CLASSIFY}&top_k=all", IMAGE),
    "top_k of 2^40": with_length(f"{CLASSIFY}&top_k={2**40}", IMAGE),
    "another kind of heat map": with_length(f"{CLASSIFY}&heatmap=true", IMAGE),
    "no timeout": with_length(CLASSIFY, IMAGE, "x-request-timeout: 0"),
    "a timeout that is not a number": with_length(CLASSIFY, IMAGE, "x-request-timeout: nan"),
    "a timeout with an underscore": with_length(CLASSIFY, IMAGE, "x-request-timeout: 5_0"),
    "too little time": with_length(CLASSIFY, IMAGE, "x-request-timeout: 0.0000001"),
    "a path out of the models": request("GET /v2/models/../../etc/passwd"),
    "an encoded path out of the models": request("GET /v2/models/..%2F..%2Fetc%2Fpasswd"),
    "two dots as a model": request("GET /v2/models/.."),
    "NUL in a model's name": request("GET /v2/models/six%00"),
    "an unknown version": request("GET /v2/models/six/versions/2"),
    "readiness of an unknown model": request("GET /v2/models/nine/ready"),
    "no JSON": infer(b"images"),
    "JSON of another kind": infer([]),
    "an unknown field": infer({**tensor(), "model": "six"}),
    "the name of a model other than the path's": infer({**tensor(), "model_name": "three"}),
    "the name of a version other than the path's": with_length(
        "POST /v2/models/six/versions/1/infer", json.dumps({**tensor(), "model_version": "2"}).encode()
    ),
    "JSON that is deeply nested": infer(b'{"inputs":' + b"[" * 900 + b"]" * 900 + b"}"),
    "JSON of a hundred thousand tensors": infer({"inputs": tensor()["inputs"] * 2 + [{}] * 100_000}),
    "another input": infer(tensor(name="image")),
    "another type": infer(tensor(datatype="FP32")),
    "a shape that is too large": infer(tensor(shape=[2])),
    "a shape of 2^70": infer(tensor(shape=[2**70])),
    "a negative shape": infer(tensor(shape=[-1])),
    "neither base64 nor binary": infer(tensor(data=["?"])),
    "a number in the place of base64": infer(tensor(data=[7])),
    "base64 of another kind": infer(tensor(parameters={"content_type": "np"})),
    "a parameter of an input": infer(tensor(parameters={"sequence": None, "resize": 224})),
    "no data": infer(tensor(data=None)),
    "two kinds of data": infer(tensor(parameters={"binary_data_size": 3})),
    "a binary size beyond the body": infer(tensor(data=None, parameters={"binary_data_size": 3})),
    "a binary size of another type": infer(tensor(data=None, parameters={"binary_data_size": True})),
    "a length of JSON beyond the body": infer(tensor(), f"Inference-Header-Content-Length: {MIB}"),
    "a length of JSON that is no number": infer(tensor(), "Inference-Header-Content-Length: -1"),
    "bytes after the binary data": infer(b'{"inputs":[]}123', "Inference-Header-Content-Length: 13"),
    "a parameter of 2^70": infer({**tensor(), "parameters": {"timeout": 2**70}}),
    "an unknown output": infer({**tensor(), "outputs": [{"name": "logits"}]}),
    "classification of 2^40": infer(
        {**tensor(), "outputs": [{"name": "scores", "parameters": {"classification": 2**40}}]}
    ),
    "100 MB of JSON": request(INFER, f"Content-Length: {100 * MIB}", "Content-Type: application/json"),
    "chunks twice": chunked(SECOND, "Transfer-Encoding: chunked"),
    "chunks, then a length": chunked(SECOND, "Content-Length: 4"),
    "chunks and something else": request(CLASSIFY, "Transfer-Encoding: chunked, identity", body=SECOND),
    "a transfer encoding that is nearly chunked": request(CLASSIFY, "Transfer-Encoding: \x0bchunked", body=SECOND),
    "a blank before the colon of a transfer encoding": request(CLASSIFY, "Transfer-Encoding : chunked", body=SECOND),
    "a length with a sign": request(CLASSIFY, "Content-Length: +5", body=SECOND),
    "a hexadecimal length": request(CLASSIFY, "Content-Length: 0x5", body=SECOND),
    "two lengths in one header": request(CLASSIFY, "Content-Length: 5, 6", body=SECOND),
    "a length in Arabic digits": request(CLASSIFY, "Content-Length: \u0665", body=SECOND),
    "a chunk of negative size": chunked(b"-1\r\nabc\r\n" + SECOND),
    "a chunk of 2^120 bytes": chunked(b"f" * 30 + b"\r\nabc\r\n" + SECOND),
    "a chunk longer than its size": chunked(b"3\r\nabcdef\r\n" + SECOND),
    "a line break inside a chunk's extension": chunked(b"3;a\nb\r\nabc\r\n" + SECOND),
    "a lone CR in a header": request("GET /v1/models", "X: a\rTransfer-Encoding: chunked", body=SECOND),
    "NUL in a header": request("GET /v1/models", "X: a\0", body=SECOND),
    "a blank in the path": request("GET /v1/models HTTP/1.1 x", body=SECOND),
    "HTTP/0.9": b"GET /v1/models\r\n\r\n",
    "HTTP/1.2": b"GET /v1/models HTTP/1.2\r\nHost: localhost\r\n\r\n",
    "two Hosts in one header": b"GET /v1/models HTTP/1.1\r\nHost: localhost, evil.example\r\n\r\n",
    "a user before the Host": b"GET /v1/models HTTP/1.1\r\nHost: evil@localhost\r\n\r\n",
    "the address of another site": request("GET http://evil.example/v1/models"),
    "CONNECT": request("CONNECT evil.example:443"),
    "compressed twice": with_length(CLASSIFY, b"abc", "Content-Encoding: gzip, gzip"),
    "200 MB of zeros, compressed": with_length(CLASSIFY, ZEROS, "Content-Encoding: gzip"),
    "a negative scale": with_length(f"{CLASSIFY}&scales=-40", IMAGE),
    "5000 scales": with_length(f"{CLASSIFY}&scales={'40,' * 4999}40", IMAGE),
    "a number with an underscore": with_length(f"{CLASSIFY}&top_k=0_5", IMAGE),
    "a number in Arabic digits": with_length(f"{CLASSIFY}&top_k=%D9%A3", IMAGE),
    "a field of the message that is no parameter": with_length(f"{CLASSIFY}&image=x", IMAGE),
    "JSON in UTF-16": infer(json.dumps(tensor()).encode("utf-16")),
    "NaN in JSON": infer(tensor(shape=[float("nan")])),
    "a lone surrogate": infer(b'{"id":"\\ud800","inputs":[]}'),
}  # fmt: skip


STATUSES = documented("HTTP")


def test_the_page_lists_exactly_these_requests() -> None:
    assert list(STATUSES) == list(BAD)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_the_documented_status_and_the_next_one_works(server: RunningServer, name: str) -> None:
    found, headers, body = raw_call(server, BAD[name])
    assert ([str(found)], headers["content-type"]) == (STATUSES[name], "application/json")
    assert len(error_in(body)) > 10
    assert b"/secret" not in body
    if found == 405:
        assert headers["allow"]
    with client_to(server) as client:
        assert client.post("/v1/classify?model=six", content=IMAGE).json()["predictions"]


@pytest.mark.parametrize("name", [name for name, sent in BAD.items() if sent.endswith(SECOND)])
def test_nothing_after_a_request_whose_end_is_in_doubt_is_taken_for_a_second_one(
    server: RunningServer, name: str
) -> None:
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(BAD[name])
        received = b""
        while part := connection.recv(2**16):
            received += part
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"\r\nconnection: close\r\n") == received.count(b"\r\n\r\n") == 1


def test_a_wrong_form_is_answered_with_the_right_one(server: RunningServer) -> None:
    for name in (each for each in BAD if each.startswith("a form with")):
        assert "curl -F image=@photo.jpg" in error_in(raw_call(server, BAD[name])[2]), name


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


def test_the_binary_data_of_many_inputs_is_not_copied_for_each_of_them() -> None:
    """Copying holds the GIL: 64 MiB behind 220 inputs of one byte held it for seconds."""
    inputs = [{"name": "", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 1}}] * 100
    head = json.dumps({"inputs": inputs}).encode()
    body = head + b"x" * 4 * MIB
    tracemalloc.start()
    with pytest.raises(UsageError, match="the request has 100 inputs"):
        check_request(parse_infer_request(body, str(len(head)), "six"), Mock())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB, "the head and its objects, far less than the data"


@pytest.mark.parametrize("side", [5, 224])
def test_pixels_in_json_are_refused_with_what_the_model_takes(server: RunningServer, side: int) -> None:
    plane = [[0.5] * side] * side
    nested, flat = [[plane] * 3], [0.5] * (3 * side * side)
    for data in (nested, flat):
        sent = infer(tensor(shape=[1, 3, side, side], datatype="FP32", data=data))
        status, _, body = raw_call(server, sent)
        assert (status, "'images', datatype BYTES, shape [N]" in error_in(body)) == (400, True)
        assert error_in(body).endswith("image files, not arrays of pixels")


def test_a_model_in_the_body_that_is_not_the_paths_is_refused_with_both(server: RunningServer) -> None:
    _, _, body = raw_call(server, BAD["the name of a model other than the path's"])
    assert "`model_name` is 'three', but the path has 'six'" in error_in(body)
    _, _, body = raw_call(server, BAD["the name of a version other than the path's"])
    assert "`model_version` is '2', but the path has '1'" in error_in(body)
    for version, expected in (("1", 200), ("2", 404)):
        sent = infer({**tensor(), "model_name": "six", "model_version": version})
        assert raw_call(server, sent)[0] == expected, "the version of the body counts where the path has none"


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


def test_an_idle_connection_is_closed_after_its_time() -> None:
    with running_server(http=HttpOptions(0, keep_alive=0.3), six=FakeSession()) as server:
        host, _, port = server.http.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            for _ in range(2):
                connection.sendall(request("GET /v1/models"))
                assert read_response(connection)[0] == 200
            assert connection.recv(1) == b""


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
