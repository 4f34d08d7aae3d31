"""Helpers for tests of the HTTP port: calls of a client library, and bytes that no library would send."""

import json
import socket
from typing import Any

import httpx

from prelunet.evaluator.serving.options import HttpOptions
from tests.serving.serving_harness import RunningServer, png

ON = HttpOptions(port=0)
IMAGE = png(40, 57)


def client_to(server: RunningServer, **options: Any) -> httpx.Client:
    # verify: no TLS here, and loading the system's authorities takes longer than most calls
    return httpx.Client(base_url=f"http://{server.http}", timeout=30, trust_env=False, verify=False, **options)


def raw_call(server: RunningServer, sent: bytes, seconds: float = 20) -> tuple[int, dict[str, str], bytes]:
    """Send bytes and return status, headers and body of the first response; status 0 if the connection is closed."""
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(sent)
        return read_response(connection)


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the next response."""
    with connection.makefile("rb") as received:
        status = received.readline().split()
        if not status:
            return 0, {}, b""
        headers = {}
        while (line := received.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(status[1]), headers, received.read(int(headers.get("content-length", "0")))


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    """Return the bytes of a request."""
    return "\r\n".join([f"{line} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode() + body


def error_in(body: bytes) -> str:
    return str(json.loads(body)["error"])
