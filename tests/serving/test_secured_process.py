"""`prelunet serve` with TLS and tokens as a process, and what it refuses to start with."""

import signal
import time
import urllib.request
from pathlib import Path

import pytest

from prelunet.evaluator.client import Client, Credentials, RetryPolicy
from prelunet.evaluator.errors import Unauthenticated
from tests.helpers.tls_files import TLS, install_pair, secret_file, tls_options, write_tokens
from tests.serving.serving_harness import png
from tests.serving.test_serving_process import model, run, serving  # noqa: F401 - `model` is a fixture

IMAGE = png(40, 57)


def test_files_named_in_the_configuration_are_used_and_read_again_while_the_server_runs(
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    tls_options(tmp_path)
    tokens, config = tmp_path / "tokens.toml", tmp_path / "serve.toml"
    (old,) = write_tokens(tokens, ("alice", ("classify",)))
    config.write_text(
        f'tls-cert = "{tmp_path}/tls.pem"\ntls-key = "{tmp_path}/tls.key"\ntoken-file = "{tokens}"\nhost = "0.0.0.0"\n'
    )
    (tmp_path / "tls.key").chmod(0o644)
    with serving(model, "--config", str(config), "--lame-duck", "0", "--metrics-port", "0") as (process, line, address):
        metrics_port = line.strip().rpartition(":")[2]
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/ready", timeout=20) as response:
            assert response.status == 200
        port = address.rpartition(":")[2]
        credentials = Credentials(tls_ca=TLS / "ca.pem", token_file=secret_file(tmp_path / "token", old))
        with Client(f"localhost:{port}", credentials=credentials, retries=RetryPolicy.none()) as client:
            assert client.classify(IMAGE).predictions
            (new,) = write_tokens(tokens, ("alice", ("classify",)))
            install_pair(tmp_path, "server-2")
            secret_file(tmp_path / "token", new)
            end = time.monotonic() + 20
            while True:
                try:
                    assert client.classify(IMAGE).predictions
                    break
                except Unauthenticated:  # until it is read, within some two seconds
                    assert time.monotonic() < end
                    time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, log = process.communicate(timeout=20)
    assert "the changed tokens are in use" in log
    assert f"other users of this machine may read or change {tmp_path}/tls.key" in log
    assert f"may read or change {tokens}" not in log
    assert "listening on" not in log, "with TLS and tokens there is nothing to warn of"
    assert not [secret for secret in (old, new) if secret in output + log]


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
