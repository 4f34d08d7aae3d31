"""Invalid addresses, and the errors of connections that fail."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from prelunet.evaluator.client.channel import checked_address
from prelunet.evaluator.errors import EnvironmentFault, NotReady, UsageError
from tests.client.client_harness import ScriptedServicer

SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # an HTTP/2 server's first frame; with it a connection is one
GOAWAY = b"\0\0\x08\7" + bytes(5) + bytes(8)  # with no further call taken


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:50051", "localhost:1", "prelunet.example:65535", "[::1]:50051", "[fe80::1%eth0]:50051",
     "dns:///prelunet:50051", "dns:prelunet:50051", "ipv4:127.0.0.1:1,127.0.0.1:2", "ipv6:[::1]:1",
     "unix:/run/prelunet.sock", "unix-abstract:prelunet", "xds:///prelunet"],
)  # fmt: skip
def test_an_address_that_grpc_understands_is_accepted(address: str) -> None:
    assert checked_address(address) == address


@pytest.mark.parametrize(
    "address",
    ["http://host:50052", "https://host:50052/v1", "grpc://host", "http://", "host", "127.0.0.1", "[::1]", "::1",
     "fe80::1:50051", "host:65536", "host:port", "host:", ":50051", "host:50051/", "host 50051", "", "host:1\n"],
)  # fmt: skip
def test_an_address_that_grpc_would_misunderstand_is_refused(client_of, address: str) -> None:
    with pytest.raises(UsageError, match=r"must be host:port, without http://.* e.g. 127.0.0.1:50051"):
        client_of(address)


@contextmanager
def listening(greet: Callable[[socket.socket], None]) -> Iterator[str]:
    """Do something with every connection, then close it; yields the address."""

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed
                return
            with connection, suppress(OSError):  # where the client was quicker
                greet(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def after_the_headers(connection: socket.socket) -> None:
    """Greet, and read until the headers of a call have come."""
    connection.sendall(SETTINGS)
    seen = b""
    while b"Classify" not in seen and (data := connection.recv(65536)):
        seen += data


def close_in_a_call(connection: socket.socket) -> None:
    after_the_headers(connection)


def reset_in_a_call(connection: socket.socket) -> None:
    after_the_headers(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def send_away_in_a_call(connection: socket.socket) -> None:
    after_the_headers(connection)
    connection.sendall(GOAWAY)


def speak_http_1(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize(
    ("greet", "words"),
    [
        # As a server does that has all its connections.
        (lambda _: None, "the (server closed the connection|connection was closed before a call)"),
        (close_in_a_call, "the server closed the connection, perhaps because it is stopping"),
        (reset_in_a_call, "the server closed the connection, perhaps because it is stopping"),
        (send_away_in_a_call, "the server closed the connection, perhaps because it is stopping"),
        (speak_http_1, "the program that listens there is not a gRPC server"),
    ],
)
def test_the_error_of_a_failed_connection_names_the_cause(client_of, greet, words: str) -> None:
    with (
        listening(greet) as address,
        client_of(address, retries=False) as client,
        pytest.raises(EnvironmentFault, match=f"^{address}: {words}") as caught,
    ):
        client.classify(b"cat", timeout=30)
    assert "nothing listens" not in str(caught.value)
    assert caught.value.__cause__.details() in str(caught.value), "gRPC's own text should be quoted"


def test_a_server_of_another_kind_is_not_waited_for(client_of) -> None:
    with (
        listening(speak_http_1) as address,
        client_of(address) as client,
        pytest.raises(EnvironmentFault, match="not a gRPC server"),
    ):
        client.classify(b"cat", timeout=None)


def test_an_unknown_host_name_is_reported_as_such(client_of) -> None:
    with (
        client_of("nobody.invalid:50051") as client,  # RFC 2606: it never is one
        pytest.raises(EnvironmentFault, match="the host name cannot be resolved"),
    ):
        client.classify(b"cat", timeout=None)


def test_the_error_of_a_server_that_loads_its_models_is_passed_on(client_to) -> None:
    loading = NotReady("the server is loading its models; try again later")
    with (
        client_to(ScriptedServicer(loading), retries=False) as client,
        pytest.raises(NotReady, match=r"^the server is loading its models; try again later$"),
    ):
        client.classify(b"cat")
