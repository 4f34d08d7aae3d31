"""`prelunet token`, and the commands that use what it makes."""

import re
import stat
from pathlib import Path

import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.serving.access import AccessControl, parse_tokens
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.watched_files import Certificates
from tests.helpers.fakes import FakeSession
from tests.helpers.tls_files import TLS, tls_options
from tests.serving.serving_harness import png, running_server

CLASSIFY = "/prelunet.v1.PreluNetService/Classify"


def test_the_token_and_the_lines_for_the_server_are_printed_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["token", "alice", "--scope", "classify", "--scope", "evaluate", "--rate", "2.5", "--share", "0.5"]) == 0
    printed = capsys.readouterr()
    token = parse_tokens(Path("stdout"), printed.out.encode())["alice"]
    assert (token.scopes, token.rate, token.share) == (("classify", "evaluate"), 2.5, 0.5)
    secret = printed.err.splitlines()[-1]
    assert re.fullmatch(r"[\w-]{43}", secret), "32 bytes in base 64"
    assert secret not in printed.out


def test_tokens_are_added_to_the_servers_file_and_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tmp_path / "tokens.toml"
    for name, scope in (("alice", "classify"), ("bob", "evaluate")):
        secret = tmp_path / f"{name}.token"
        assert run(["token", name, "--scope", scope, "--token-file", str(tokens), "--secret-file", str(secret)]) == 0
        assert {stat.S_IMODE(path.stat().st_mode) for path in (tokens, secret)} == {0o600}
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(f"{name}.token" in printed.err for name in ("alice", "bob"))
    assert (tmp_path / "alice.token").read_text().strip() not in printed.err
    access = AccessControl(tokens)
    found = access.check(CLASSIFY, [f"Bearer {(tmp_path / 'alice.token').read_text().strip()}"])
    assert found is not None
    assert found[0] == "alice"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["alice", "--scope", "classify"], "has a token 'alice' already"),
        (["bob", "--scope", "all"], "no scope 'all'. Valid: classify, evaluate, admin"),
        (["bob"], "--scope"),
        (["two words", "--scope", "classify"], "'two words' is not a name for a token"),
        (["bob", "--scope", "classify", "--share", "2"], "--share"),
        (["bob", "--scope", "classify", "--rate", "0"], "--rate"),
        (["bob", "--scope", "classify", "--secret-file", "{folder}/alice.token"], "alice.token: already exists"),
        (["bob", "--scope", "classify", "--secret-file", "{folder}/none/bob.token"], "no such file or folder"),
    ],
)
def test_an_invalid_token_is_refused_and_the_files_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    files = ["--token-file", str(tmp_path / "tokens.toml")]
    secret = tmp_path / "alice.token"
    assert run(["token", "alice", "--scope", "classify", *files, "--secret-file", str(secret)]) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(["token", *(each.format(folder=tmp_path) for each in arguments), *files]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_classify_and_doctor_reach_a_server_with_tls_client_certificates_and_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image, tokens, token = tmp_path / "image.png", tmp_path / "tokens.toml", tmp_path / "token"
    image.write_bytes(png(40, 57))
    run(["token", "alice", "--scope", "classify", "--token-file", str(tokens), "--secret-file", str(token)])
    tls = ["--tls-ca", str(TLS / "ca.pem"), "--tls-cert", str(TLS / "client.pem"), "--tls-key", str(TLS / "client.key")]
    certificates = Certificates(tls_options(tmp_path, mutual=True), Metrics())
    with running_server(certificates=certificates, access=AccessControl(tokens), fake=FakeSession()) as server:
        to_server = ["--server", server.address]
        assert run(["classify", str(image), *to_server, *tls, "--token-file", str(token)]) == 0
        assert "class " in capsys.readouterr().out
        assert run(["doctor", *to_server, "--port", "0", *tls, "--token-file", str(token)]) == 0
        assert f"{server.address}: SERVING" in capsys.readouterr().out
        assert run(["classify", str(image), *to_server, *tls]) == 2
        assert "this server requires a token" in capsys.readouterr().err
        assert run(["doctor", "--json", *to_server, "--port", "0", *tls]) == 6
        assert "this server requires a token" in capsys.readouterr().err
        assert run(["classify", str(image), *to_server]) == 5
        assert "The server may require TLS (--tls-ca)" in capsys.readouterr().err
        assert run(["doctor", "--json", *to_server, "--port", "0"]) == 6
        assert "The server may require TLS (--tls-ca)" in capsys.readouterr().err
        assert run(["classify", str(image), *to_server, *tls[:4]]) == 2
        assert "belong together" in capsys.readouterr().err
        for name, value in zip(("CA", "CERT", "KEY"), tls[1::2], strict=True):
            monkeypatch.setenv(f"PRELUNET_TLS_{name}", value)
        monkeypatch.setenv("PRELUNET_TOKEN_FILE", str(token))
        assert run(["classify", str(image), *to_server]) == 0
        assert run(["doctor", *to_server, "--port", "0"]) == 0
