"""The tables of credentials in bad-calls.md: bad ones are refused at both ports, and the next good call works."""

import hashlib
import logging
import re
import shutil
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.access import REQUIRED, AccessControl, create_token
from prelunet.evaluator.serving.observability.logs import JsonFormatter
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.watched_files import Certificates
from tests.helpers.bad_calls_page import documented
from tests.helpers.fakes import FakeSession
from tests.helpers.tls_files import TLS, install_pair, tls_options
from tests.serving.http.http_calls import IMAGE, ON, client_to
from tests.serving.serving_harness import RunningServer, running_server

TOKENS = documented("Tokens")
CLIENT_CERTIFICATES = documented("Certificates of clients")
FILES = documented("Files of the server")


def over_grpc(
    server: RunningServer, *authorizations: str, tls: grpc.ChannelCredentials | None = None
) -> tuple[str, str]:
    """Classify; return the status and the error."""
    metadata = tuple(("authorization", each) for each in authorizations)
    request = pb.ClassifyRequest(image=IMAGE, protocol="center")
    options = [("grpc.use_local_subchannel_pool", 1)]
    with (
        grpc.insecure_channel(server.address, options)
        if tls is None
        else grpc.secure_channel(server.address, tls, options)
    ) as channel:
        try:
            pb_grpc.PreluNetServiceStub(channel).Classify(request, metadata=metadata, timeout=20)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return "OK", ""


def over_http(server: RunningServer, *authorizations: str, tls: ssl.SSLContext | None = None) -> tuple[str, str]:
    """Classify; return the status and the body."""
    url = f"http{'s' * (tls is not None)}://{server.http}/v1/classify?protocol=center"
    headers = [("authorization", each) for each in authorizations]
    try:
        with httpx.Client(verify=tls or True, trust_env=False, timeout=20) as client:
            answer = client.post(url, content=IMAGE, headers=headers)
    except httpx.TransportError as error:
        return "no answer", str(error)
    return str(answer.status_code), answer.text


# Tokens. They are in the metadata `authorization` of gRPC, and in the header of HTTP.

# From the secrets by name to what is sent.
SENT: Mapping[str, Callable[[Mapping[str, str]], tuple[str, ...]]] = {
    "none": lambda _: (),
    "empty": lambda _: ("",),
    "Bearer": lambda _: ("Bearer",),
    "an unknown token": lambda _: (f"Bearer {'z' * 43}",),
    "a token alone": lambda s: (s["alice"],),
    "Basic and a token": lambda s: (f"Basic {s['alice']}",),
    "Token and a token": lambda s: (f"Token {s['alice']}",),
    "Bearer and a token with Bearer again": lambda s: (f"Bearer Bearer {s['alice']}",),
    "a token without its last letter": lambda s: (f"Bearer {s['alice'][:-1]}",),
    "a token with one more letter": lambda s: (f"Bearer {s['alice']}x",),
    "a token in the other case": lambda s: (f"Bearer {s['alice'].swapcase()}",),
    "the hash of a token": lambda s: (f"Bearer {hashlib.sha256(s['alice'].encode()).hexdigest()}",),
    "the name of a token": lambda _: ("Bearer alice",),
    "a token twice": lambda s: (f"Bearer {s['alice']}", f"Bearer {s['alice']}"),
    "an unknown token, then a known one": lambda s: ("Bearer garbage", f"Bearer {s['alice']}"),
    "two tokens in one value": lambda s: (f"Bearer {s['alice']}, Bearer {s['alice']}",),
    "a token that was removed": lambda s: (f"Bearer {s['removed']}",),
    "a token without the scope": lambda s: (f"Bearer {s['evaluating']}",),
    "a token above its rate": lambda s: (f"Bearer {s['slow']}",),
}


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, dict[str, str]]]:
    """Run a server with tokens; yields it, and the secrets by name."""
    path = tmp_path_factory.mktemp("secret") / "tokens.toml"
    created = {name: create_token(name, ["classify"]) for name in ("removed", "alice")}
    created["evaluating"] = create_token("evaluating", ["evaluate"])
    created["slow"] = create_token("slow", ["classify"], rate=1e-4)
    path.write_text("".join(lines for _, lines in created.values()))
    secrets = {name: secret for name, (secret, _) in created.items()}
    metrics = Metrics()
    access = AccessControl(path, metrics)
    with running_server(http=ON, metrics=metrics, access=access, six=FakeSession()) as server:
        for name in ("removed", "slow"):
            assert over_grpc(server, f"Bearer {secrets[name]}")[0] == "OK"
        path.write_text("".join(lines for name, (_, lines) in created.items() if name != "removed"))
        for _ in range(2):
            access.files.poll()
        yield server, secrets


def test_the_page_lists_exactly_these_credentials() -> None:
    assert list(TOKENS) == list(SENT)
    assert list(FILES) == list(SPOILED)


@pytest.mark.parametrize("name", SENT)
def test_a_bad_token_is_refused_at_both_ports_and_is_in_no_answer_and_no_log_line(
    with_tokens: tuple[RunningServer, dict[str, str]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, secrets = with_tokens
    caplog.set_level(logging.DEBUG)
    good, sent = f"Bearer {secrets['alice']}", SENT[name](secrets)
    answers = [over_grpc(server, *sent), over_http(server, *sent)]
    assert [status for status, _ in answers] == TOKENS[name]
    assert [over_grpc(server, good)[0], over_http(server, good)[0]] == ["OK", "200"]
    texts = [text for _, text in answers] + [JsonFormatter().format(record) for record in caplog.records]
    texts.append(server.models.metrics.text()[0].decode())
    hidden = [*secrets.values(), "/secret", "tokens.toml", "z" * 43]
    assert not [text for text in texts for each in hidden if each in text]


def test_a_caller_without_a_token_is_told_no_name_of_a_model_and_no_version(
    with_tokens: tuple[RunningServer, dict[str, str]],
) -> None:
    server, _ = with_tokens
    answers = []
    with client_to(server) as client:
        for path, methods in client.get("/openapi.json").json()["paths"].items():
            for method in methods:
                answers.append(client.request(method, path.format(name="zzz", version="9")).text)
        unknown = [client.get(f"/v2/models/{name}/ready") for name in ("zzz", "zzz/versions/9", "six/versions/9")]
        assert {(each.status_code, each.text) for each in unknown} == {(404, unknown[0].text)}
    with grpc.insecure_channel(server.address) as channel:
        for method in REQUIRED:
            call = channel.stream_stream(method)(iter([b"\n\3zzz\x12\0019"]), timeout=30)  # name "zzz", version "9"
            try:
                answers.append(f"{next(call)}")
            except grpc.RpcError as error:
                answers.append(f"{error}{error.trailing_metadata()}")
            call.cancel()
    assert not [each for each in answers if re.search(r"\bsix\b", each)]


# Certificates.


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run a server that requires certificates of its clients."""
    certificates = Certificates(tls_options(tmp_path_factory.mktemp("tls"), mutual=True), Metrics())
    with running_server(http=ON, certificates=certificates, six=FakeSession()) as server:
        yield server


def calls_with(server: RunningServer, pair: str) -> list[str]:
    """Return the statuses of calls over both ports. pair: a certificate of a client, – for none."""
    files = None if pair == "–" else (TLS / f"{pair}.pem", TLS / f"{pair}.key")
    context = ssl.create_default_context(cafile=TLS / "ca.pem")
    key_and_chain: tuple[bytes, ...] = ()
    if files is not None:
        context.load_cert_chain(*files)
        key_and_chain = (files[1].read_bytes(), files[0].read_bytes())
    channel = grpc.ssl_channel_credentials((TLS / "ca.pem").read_bytes(), *key_and_chain)
    return [over_grpc(server, tls=channel)[0], over_http(server, tls=context)[0]]


@pytest.mark.parametrize("name", CLIENT_CERTIFICATES)
def test_a_server_with_client_authorities_accepts_only_certificates_of_theirs(mutual: RunningServer, name: str) -> None:
    pair, *statuses = CLIENT_CERTIFICATES[name]
    assert calls_with(mutual, pair) == statuses
    assert calls_with(mutual, "client") == ["OK", "200"]


def test_both_ports_accept_a_client_authority_without_key_usage_as_of_python_3_13(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = ssl.create_default_context

    def strict(purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, **files: Path) -> ssl.SSLContext:
        context = create(purpose, **files)
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    options = replace(tls_options(tmp_path), tls_client_ca=TLS / "plain-ca.pem")
    with running_server(http=ON, certificates=Certificates(options, Metrics()), six=FakeSession()) as server:
        assert calls_with(server, "plain-client") == ["OK", "200"]
        assert calls_with(server, "client")[0] == "UNAVAILABLE"


# Files that a server reads, at its start and again when they change.

SPOILED: Mapping[str, Callable[[Path], object]] = {
    "the key of another certificate": lambda folder: shutil.copy(TLS / "server-2.key", folder / "tls.key"),
    "a certificate cut off": lambda folder: (folder / "tls.pem").write_bytes((TLS / "server.pem").read_bytes()[:300]),
    "an empty certificate": lambda folder: (folder / "tls.pem").write_text(""),
    "a key of random bytes": lambda folder: (folder / "tls.key").write_bytes(b"\0\xff" * 200),
    "an encrypted key": lambda folder: shutil.copy(TLS / "encrypted.key", folder / "tls.key"),
    "no key": lambda folder: (folder / "tls.key").unlink(),
    "an expired certificate": lambda folder: install_pair(folder, "expired"),
    "a certificate that is not valid yet": lambda folder: install_pair(folder, "future"),
    "an Ed25519 key": lambda folder: install_pair(folder, "ed25519"),
    "client authorities that are none": lambda folder: (folder / "ca.pem").write_bytes(b"nothing"),
    "tokens that are not TOML": lambda folder: (folder / "tokens.toml").write_text("[alice"),
    "tokens without a hash": lambda folder: (folder / "tokens.toml").write_text('[alice]\nscopes = ["classify"]\n'),
    "no tokens": lambda folder: (folder / "tokens.toml").write_text(""),
    "no token file": lambda folder: (folder / "tokens.toml").unlink(),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_bad_file_is_refused_at_the_start_and_never_replaces_a_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    shutil.copy(TLS / "ca.pem", tmp_path / "ca.pem")
    options = replace(tls_options(tmp_path), tls_client_ca=tmp_path / "ca.pem")
    secret, lines = create_token("alice", ["classify"])
    (tmp_path / "tokens.toml").write_text(lines)
    metrics = Metrics()
    certificates, access = Certificates(options, metrics), AccessControl(tmp_path / "tokens.toml", metrics)
    key_and_chain = [(TLS / f"client.{kind}").read_bytes() for kind in ("key", "pem")]
    tls = grpc.ssl_channel_credentials((TLS / "ca.pem").read_bytes(), *key_and_chain)
    with running_server(
        http=ON, metrics=metrics, certificates=certificates, access=access, six=FakeSession()
    ) as server:
        SPOILED[name](tmp_path)
        for _ in range(3):
            certificates.files.poll()
            access.files.poll()
        host, _, port = server.address.rpartition(":")
        assert ssl.get_server_certificate((host, int(port))) == (TLS / "server.pem").read_text()
        assert over_grpc(server, f"Bearer {secret}", tls=tls)[0] == "OK"
        refusals = [
            server.metric("prelunet_reloads_total", files=each, outcome="refused") for each in ("TLS files", "tokens")
        ]
        assert sum(refusals) == 1, "a file is reported once"
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "are not used, the previous ones stay" in line
    (message,) = FILES[name]
    assert message in line
    with pytest.raises(UsageError, match=re.escape(message)):
        Certificates(options, Metrics()), AccessControl(tmp_path / "tokens.toml")
