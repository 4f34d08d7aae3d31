"""`prelunet serve` with TLS and tokens as a process, and what it refuses to start with."""

import re
import signal
import ssl
import threading
import time
from concurrent import futures
from functools import partial
from pathlib import Path

import httpx
import pytest

from prelunet.evaluator.client import Client, Credentials
from tests.helpers.tls_files import TLS, install_pair, secret_file, tls_options, write_tokens
from tests.serving.serving_harness import eventually, png
from tests.serving.test_serving_process import model, run, serving  # noqa: F401 - `model` is a fixture

IMAGE = png(40, 57)


def test_both_ports_use_the_files_of_the_configuration_and_read_them_again_without_a_failed_call(
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    tls_options(tmp_path)
    tokens, config, token = tmp_path / "tokens.toml", tmp_path / "serve.toml", tmp_path / "token"
    secrets = write_tokens(tokens, *((name, ("classify",)) for name in ("alice", "bob", "carol")))
    lines = tokens.read_text().split("\n\n")
    tokens.write_text(lines[0])
    secret_file(token, secrets[0])
    config.write_text(
        f'tls-cert = "{tmp_path}/tls.pem"\ntls-key = "{tmp_path}/tls.key"\ntoken-file = "{tokens}"\nhost = "0.0.0.0"\n'
        "http-port = 0\nmetrics-port = 0\nlame-duck = 1\n"
    )
    (tmp_path / "tls.key").chmod(0o644)
    trusting = ssl.create_default_context(cafile=TLS / "ca.pem")
    credentials, stopped = Credentials(tls_ca=TLS / "ca.pem", token_file=token), threading.Event()
    with serving(model, "--config", str(config)) as (process, line, address), futures.ThreadPoolExecutor(1) as pool:
        http, metrics = re.findall(r"(?:http on https://|metrics on )0\.0\.0\.0:(\d+)", line)
        assert httpx.get(f"http://127.0.0.1:{metrics}/ready", trust_env=False).status_code == 200
        grpc_port = address.rpartition(":")[2]

        def over_http(secret: str) -> int:
            headers = {"authorization": f"Bearer {secret}"}
            with httpx.Client(verify=trusting, trust_env=False, timeout=20) as client:
                return client.get(f"https://localhost:{http}/v1/models", headers=headers).status_code

        def call_until_stopped() -> int:
            calls = 0
            while not stopped.is_set():  # on new connections
                with Client(f"localhost:{grpc_port}", credentials=credentials, retries=False) as client:
                    assert client.classify(IMAGE).predictions
                assert over_http(token.read_text().strip()) == 200
                calls += 1
            return calls

        calling = pool.submit(call_until_stopped)
        try:
            for number, pair in ((1, "server-2"), (2, "server")):
                install_pair(tmp_path, pair)
                tokens.write_text("\n\n".join(lines[number - 1 : number + 1]))  # the new one beside the last
                end = time.monotonic() + 30
                while over_http(secrets[number]) != 200:
                    assert time.monotonic() < end, "the new token is not accepted"
                    time.sleep(0.1)
                for port in (grpc_port, http):  # the files of TLS and the tokens are read at different moments
                    certificate = partial(ssl.get_server_certificate, ("127.0.0.1", int(port)))
                    eventually(lambda get=certificate, pair=pair: get() == (TLS / f"{pair}.pem").read_text())
                secret_file(tmp_path / "new", secrets[number]).replace(token)
        finally:
            stopped.set()
        assert calling.result() > 10
        process.send_signal(signal.SIGTERM)
        assert [over_http(each) for each in secrets] == [401, 200, 200]  # lame duck
        output, log = process.communicate(timeout=20)
    assert "no call was lost" in output
    assert log.count("the changed tokens are in use") == log.count("the changed TLS files are in use") == 2
    assert f"other users of this machine may read or change {tmp_path}/tls.key" in log
    assert f"may read or change {tokens}" not in log
    assert "listening on" not in log, "with TLS and tokens there is nothing to warn of"
    assert not [secret for secret in secrets if secret in output + log]


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--host", "0.0.0.0"], ["--host 0.0.0.0: without TLS", "--tls-cert and --tls-key", "--insecure"]),
        (["--host", "::", "--token-file", "{folder}/tokens.toml"], ["--host ::: without TLS", "--insecure"]),
        (["--tls-cert", "{folder}/tls.pem", "--tls-key", "{folder}/none.key"], ["none.key: cannot be read"]),
        (["--tls-cert", "{tls}/expired.pem", "--tls-key", "{tls}/expired.key"], ["expired on 2010-12-31"]),
        (["--tls-cert", "{tls}/server.pem", "--tls-key", "{tls}/client.key"], ["client.key: is not the key"]),
        (["--token-file", "{folder}/none.toml"], ["none.toml: cannot be read"]),
        (["--token-file", "{folder}/empty.toml"], ["empty.toml: no token"]),
    ],
)
def test_a_server_that_would_be_open_or_unusable_does_not_start(
    model: Path,  # noqa: F811
    tmp_path: Path,
    options: list[str],
    messages: list[str],
) -> None:
    tls_options(tmp_path)
    write_tokens(tmp_path / "tokens.toml", ("alice", ("classify",)))
    (tmp_path / "empty.toml").touch()
    result = run("--model", f"x={model}", "--port", "0", *(each.format(folder=tmp_path, tls=TLS) for each in options))
    assert result.returncode == 2
    assert all(message in result.stderr for message in messages), result.stderr
    assert "loading model" not in result.stderr, "it is found before anything is loaded"
    assert "Traceback" not in result.stderr


def test_insecure_lets_a_server_listen_elsewhere_with_a_warning(model: Path) -> None:  # noqa: F811
    with serving(model, "--host", "0.0.0.0", "--insecure", "--lame-duck", "0") as (process, _, address):
        with Client(f"127.0.0.1:{address.rpartition(':')[2]}") as client:
            assert client.classify(IMAGE).predictions
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert "listening on 0.0.0.0 without TLS, so that traffic can be read on the way, and without tokens" in log
