"""`prelunet serve` with HTTP as a process: TLS, tokens, rotation of both, the end after a signal."""

import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from prelunet.evaluator.client import Client
from tests.helpers.tls_files import TLS, install_pair, tls_options, write_tokens
from tests.serving.http.http_calls import IMAGE
from tests.serving.test_serving_process import model, serving  # noqa: F401 - `model` is a fixture


def test_calls_over_http_survive_new_certificates_and_tokens_and_are_answered_until_the_server_stops(
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    tls_options(tmp_path)
    tokens, config = tmp_path / "tokens.toml", tmp_path / "serve.toml"
    (secret,) = write_tokens(tokens, ("alice", ("classify",)))
    config.write_text(
        f'tls-cert = "{tmp_path}/tls.pem"\ntls-key = "{tmp_path}/tls.key"\ntoken-file = "{tokens}"\nhost = "0.0.0.0"\n'
        'http-port = 0\nhttp-host-names = ["flowers.example.org"]\nlame-duck = 1\n'
    )
    trusting = ssl.create_default_context(cafile=TLS / "ca.pem")
    headers, statuses, stopped = {"authorization": f"Bearer {secret}"}, [], threading.Event()
    with serving(model, "--config", str(config)) as (process, line, _):
        port = line.strip().rpartition(":")[2]
        assert f"http on 0.0.0.0:{port}" in line

        def call_until_refused() -> None:
            while not stopped.is_set():
                with httpx.Client(verify=trusting, trust_env=False, timeout=20) as client:  # a new connection each
                    url = f"https://localhost:{port}/v1/classify?protocol=center"
                    statuses.append(client.post(url, content=IMAGE, headers=headers).status_code)

        calls = threading.Thread(target=call_until_refused)
        calls.start()
        for pair, name in (("server-2", "bob"), ("server", "carol")):
            old = tokens.read_text()
            write_tokens(tokens, (name, ("evaluate",)))
            tokens.write_text(tokens.read_text() + old)
            install_pair(tmp_path, pair)
            time.sleep(2.5)  # two looks at the files
        stopped.set()
        calls.join()
        process.send_signal(signal.SIGTERM)
        with httpx.Client(verify=trusting, trust_env=False, timeout=20) as client:
            url = f"https://localhost:{port}/v1/models"
            assert client.get(url, headers=headers).status_code == 200  # lame duck
            assert client.get(url).status_code == 401
        output, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "no call was lost" in output
    assert log.count("the changed tokens are in use") == log.count("the changed TLS files are in use") == 2
    assert len(statuses) > 10
    assert set(statuses) == {200}
    assert secret not in output + log


WITHOUT_FILES = """
import asyncio, os, resource, socket
from prelunet.evaluator.serving.http.listener import ConnectionLimits, Listener
from prelunet.evaluator.serving.http.metrics import metrics_app
from prelunet.evaluator.serving.observability.logs import configure_logging

async def main():
    listener = Listener(metrics_app(bytes, lambda: True), "127.0.0.1", 0, ConnectionLimits(9), option="--metrics-port")
    listener.open()
    client = socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    await asyncio.sleep(1.5)
    print(listener.connections)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    while not listener.connections:
        await asyncio.sleep(0.01)
    await listener.close_within(1)

configure_logging()
asyncio.run(main())
"""


def test_when_no_file_descriptor_is_left_the_log_says_so_and_connections_wait() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "0\n"
    assert 1 <= result.stderr.count("cannot accept a connection: Too many open files") <= 3, result.stderr


def test_without_the_option_there_is_no_http(model: Path) -> None:  # noqa: F811
    with serving(model, "--lame-duck", "0") as (_, line, address), Client(address) as client:
        assert client.ready()
        assert "http on" not in line
