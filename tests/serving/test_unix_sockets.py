"""A server on Unix sockets: who reaches it, whose calls they are, and what becomes of the socket files."""

import asyncio
import ipaddress
import json
import logging
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from prelunet.evaluator.client import AsyncClient, Client, Credentials
from prelunet.evaluator.errors import EnvironmentFault, UsageError
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.access import AccessControl
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import HttpOptions, ServerLimits
from prelunet.evaluator.serving.proxies import TrustedProxies, parse_networks
from prelunet.evaluator.serving.server import Server
from prelunet.evaluator.serving.watched_files import Certificates
from tests.helpers.fakes import FakeSession
from tests.helpers.tls_files import secret_file, tls_options, write_tokens
from tests.serving.event_loop import async_test
from tests.serving.serving_harness import RunningServer, eventually, png, running_server
from tests.serving.test_serving_process import PRELUNET, model, run  # noqa: F401 - `model` is a fixture

IMAGE = png(40, 57)
KEY = "x-forwarded-for"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    http = HttpOptions(unix_socket=tmp_path / "http.sock")
    with running_server(http=http, unix_socket=tmp_path / "50% grpc.sock", six=FakeSession()) as running:
        yield running


def over_http(path: Path) -> httpx.Client:
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=30, trust_env=False
    )


def test_both_clients_and_http_get_the_same_answer(server: RunningServer, tmp_path: Path) -> None:
    async def asynchronously() -> object:
        async with AsyncClient(server.address) as client:
            return (await client.classify(IMAGE)).predictions

    with Client(server.address) as client, over_http(tmp_path / "http.sock") as http:
        expected = client.classify(IMAGE).predictions
        found = http.post("/v1/classify", content=IMAGE).json()["predictions"]
    assert [(each["name"], pytest.approx(each["score"])) for each in found] == [(p.name, p.score) for p in expected]
    assert asyncio.run(asynchronously()) == expected


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_reaches_http(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(IMAGE)
    command = ["curl", "--silent", "--fail", "--unix-socket", server.http.removeprefix("unix:"), "-F"]
    done = subprocess.run(
        [*command, "image=@photo.png", "http://localhost/v1/classify"], cwd=tmp_path, capture_output=True, check=True
    )
    assert json.loads(done.stdout)["predictions"]


@pytest.mark.parametrize(("trusted", "identity"), [([], "unix"), (["unix:"], "ipv4:10.1.2.3")])
def test_all_peers_are_one_client_unless_their_proxy_is_trusted_to_name_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trusted: list[str], identity: str
) -> None:
    caplog.set_level(logging.INFO)
    proxies = TrustedProxies(KEY, parse_networks(["192.0.2.0/24", *trusted]))
    grpc_path, http_path = tmp_path / "grpc.sock", tmp_path / "http.sock"
    with running_server(
        server_limits=ServerLimits(proxies=proxies), http=HttpOptions(unix_socket=http_path), unix_socket=grpc_path,
        six=FakeSession(),
    ) as server:  # fmt: skip
        with over_http(http_path) as http:
            assert http.get("/v1/models", headers={KEY: "8.8.8.8, 10.1.2.3"}).status_code == 200
        with grpc.insecure_channel(f"unix:{grpc_path}") as channel:
            stub = pb_grpc.PreluNetServiceStub(channel)
            stub.ListModels(pb.ListModelsRequest(), metadata=((KEY, "8.8.8.8, 10.1.2.3"),))
        eventually(lambda: len(server.calls_logged(caplog)) == 2)
    ended = [(each["peer"], each.get("client", "unix")) for each in server.calls_logged(caplog)]
    assert ended == [("unix:", identity)] * 2


def test_sockets_require_the_tokens_but_no_tls_of_the_ports(tmp_path: Path) -> None:
    (secret,) = write_tokens(tmp_path / "tokens.toml", ("alice", ("classify",)))
    access = AccessControl(tmp_path / "tokens.toml")
    certificates = Certificates(tls_options(tmp_path), Metrics())
    http = tmp_path / "http.sock"
    with running_server(
        certificates=certificates, access=access, unix_socket=tmp_path / "grpc.sock",
        http=HttpOptions(unix_socket=http), six=FakeSession(),
    ) as server:  # fmt: skip
        credentials = Credentials(token_file=secret_file(tmp_path / "token", secret))
        with Client(server.address, credentials=credentials) as client, over_http(http) as plain:
            assert client.classify(IMAGE).predictions
            assert plain.get("/v1/models").status_code == 401
            assert plain.get("/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code == 200


# The files.


def left_by_a_dead_server(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()


@async_test
async def test_the_socket_of_a_dead_server_is_replaced_and_ours_are_removed_when_the_port_closes(
    tmp_path: Path,
) -> None:
    paths = tmp_path / "grpc.sock", tmp_path / "http.sock"
    for path in paths:
        left_by_a_dead_server(path)
    server = Server("127.0.0.1", 0, unix_socket=paths[0], http=HttpOptions(unix_socket=paths[1]))
    await server.open()
    assert all(path.is_socket() for path in paths)
    await server.stop(0)
    assert not any(path.exists() for path in paths)
    successor = Server("127.0.0.1", 0, unix_socket=paths[0], http=HttpOptions(unix_socket=paths[1]))
    await successor.open()
    await server.stop(0)
    assert all(path.is_socket() for path in paths), "a stopped server removed the sockets of the next"
    await successor.stop(0)


@pytest.mark.parametrize("option", ["--unix-socket", "--http-unix-socket"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("server", "a server is listening there"), ("file", "this file is not a socket"),
        ("folder", "this file is not a socket"), ("link", "this file is not a socket"),
        ("no folder", "No such file or directory"), ("too long", "too long"),
    ],
)  # fmt: skip
@async_test
async def test_a_path_that_cannot_be_used_is_refused_and_left_alone(
    tmp_path: Path, option: str, kind: str, text: str
) -> None:
    path = tmp_path / ("x" * 200 if kind == "too long" else "none/x.sock" if kind == "no folder" else "x.sock")
    listening = socket.socket(socket.AF_UNIX)
    if kind == "server":
        listening.bind(str(path))
        listening.listen()
    elif kind == "file":
        path.write_text("a file")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nothing")
    before = path.lstat().st_ino if kind in {"server", "file", "folder", "link"} else None
    for_grpc = option == "--unix-socket"
    with pytest.raises(EnvironmentFault, match=rf"\({option}\): .*{text}.* Choose another path"):
        Server(
            "127.0.0.1", 0, unix_socket=path if for_grpc else None,
            http=HttpOptions(unix_socket=None if for_grpc else path),
        )  # fmt: skip
    assert before is None or path.lstat().st_ino == before
    listening.close()


@async_test
async def test_a_server_that_is_still_loading_keeps_its_path_and_answers_once_it_has_loaded(tmp_path: Path) -> None:
    http = HttpOptions(unix_socket=tmp_path / "http.sock")
    loading = Server("127.0.0.1", 0, http=http)
    await loading.open()
    with pytest.raises(EnvironmentFault, match="a server is listening there"):
        Server("127.0.0.1", 0, http=http)
    with over_http(tmp_path / "http.sock") as client:
        early = asyncio.create_task(asyncio.to_thread(client.get, "/v2/health/ready"))
        await asyncio.sleep(0.1)
        assert not early.done()
        await loading.start(Models((), DecodeLimits()))
        assert (await early).status_code == 200
    await loading.stop(0)


def test_http_has_a_port_or_a_socket_not_both() -> None:
    with pytest.raises(UsageError, match="--http-port and --http-unix-socket exclude each other"):
        HttpOptions(port=0, unix_socket=Path("x"))


def test_networks_and_the_name_of_unix_sockets_are_parsed_together() -> None:
    assert parse_networks(["10.0.0.0/8,unix:"])[0] == ipaddress.ip_network("10.0.0.0/8")
    with pytest.raises(UsageError, match="or unix:"):
        parse_networks(["unix"])


def test_verbs_reach_a_process_on_a_socket_which_is_gone_after_its_end(
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    path, photo = tmp_path / "x.sock", tmp_path / "photo.png"
    photo.write_bytes(IMAGE)
    (tmp_path / "serve.toml").write_text(f'unix-socket = "{path}"\nhost = "0.0.0.0"\nlame-duck = 0\n')
    command = [*PRELUNET, "serve", "--model", f"telling={model}", "--config", str(tmp_path / "serve.toml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert f"serving on unix:{path}: telling" in process.stdout.readline()
        for arguments in (["classify", str(photo), "--server"], ["doctor", "--server"]):
            done = subprocess.run([*PRELUNET, *arguments, f"unix:{path}"], capture_output=True, text=True, check=False)
            assert done.returncode in {0, 6}, done.stderr
            assert ": SERVING" in done.stdout or "%" in done.stdout
        refused = run("--model", f"x={model}", "--unix-socket", str(path))
        assert (refused.returncode, "a server is listening there" in refused.stderr) == (5, True)
        process.send_signal(signal.SIGTERM)
        assert "no call was lost" in process.communicate(timeout=30)[0]
    finally:
        process.kill()
        process.communicate()
    assert not path.exists()
