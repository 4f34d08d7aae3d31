"""TLS and tokens from outside: what our clients see."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prelunet.evaluator.client import AsyncClient, Client, Credentials
from prelunet.evaluator.errors import EnvironmentFault, Overloaded, PermissionDenied, Unauthenticated, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.serving.access import REQUIRED, SCOPES, AccessControl, create_token
from prelunet.evaluator.serving.observability.logs import JsonFormatter, TextFormatter
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import AccessOptions
from prelunet.evaluator.serving.watched_files import Certificates
from tests.client.client_harness import AsyncInThread
from tests.helpers.bad_calls_page import documented
from tests.helpers.fakes import FakeSession
from tests.helpers.tls_files import TLS, secret_file, tls_options, write_tokens
from tests.serving.serving_harness import RunningServer, png, running_server

IMAGE = png(40, 57)
TRUSTING = Credentials(tls_ca=TLS / "ca.pem")


@contextmanager
def server_with(
    options: AccessOptions, tokens: Path | None = None
) -> Iterator[tuple[RunningServer, Callable[[], None]]]:
    """Run a server with TLS files and tokens; yields it, and a function that lets it see changes of the files."""
    metrics = Metrics()
    certificates = Certificates(options, metrics) if options.tls_files else None
    access = AccessControl(tokens, metrics) if tokens is not None else None

    def reload() -> None:
        for _ in range(2):
            for each in (certificates, access):
                if each is not None:
                    each.files.poll()

    with running_server(metrics=metrics, certificates=certificates, access=access, fake=FakeSession()) as server:
        yield server, reload


@contextmanager
def handshakes_with(pair: str) -> Iterator[str]:
    """Run a gRPC server without services that does not check its certificate; yields its address."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    files = (TLS / f"{pair}.key").read_bytes(), (TLS / f"{pair}.pem").read_bytes()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([files]))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture(params=[Client, AsyncInThread], ids=["sync", "async"])
def client_of(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return partial(request.param, retries=False, timeout=20)


# TLS.


def test_both_clients_classify_over_tls_by_name_and_by_address(client_of: Callable[..., Any], tmp_path: Path) -> None:
    with server_with(tls_options(tmp_path)) as (server, _):
        for address in (server.address, server.address.replace("127.0.0.1", "localhost")):
            with client_of(address, credentials=TRUSTING) as client:
                assert client.classify(IMAGE).predictions
                assert client.ready()


@pytest.mark.parametrize(("pair", "message"), documented("Certificates of servers").values())
def test_a_client_refuses_a_bad_certificate_and_says_why(
    client_of: Callable[..., Any], pair: str, message: str
) -> None:
    with (
        handshakes_with(pair) as address,
        client_of(address, credentials=TRUSTING) as client,
        pytest.raises(EnvironmentFault, match=message),
    ):
        client.classify(IMAGE)


def test_a_server_with_tls_and_a_client_without_do_not_understand_each_other_and_vice_versa(
    client_of: Callable[..., Any], tmp_path: Path
) -> None:
    with (
        server_with(tls_options(tmp_path)) as (server, _),
        client_of(server.address) as client,
        pytest.raises(EnvironmentFault, match=r"The server may require TLS \(--tls-ca\)"),
    ):
        client.classify(IMAGE)
    with (
        server_with(AccessOptions()) as (server, _),
        client_of(server.address, credentials=TRUSTING) as client,
        pytest.raises(EnvironmentFault, match="the server does not use TLS on this port"),
    ):
        client.classify(IMAGE)


def test_with_client_authorities_a_client_needs_a_certificate_of_theirs(
    client_of: Callable[..., Any], tmp_path: Path
) -> None:
    with server_with(tls_options(tmp_path, mutual=True)) as (server, _):
        with (
            client_of(server.address, credentials=TRUSTING) as client,
            pytest.raises(EnvironmentFault, match=r"or a client certificate \(--tls-cert"),
        ):
            client.classify(IMAGE)
        own = replace(TRUSTING, tls_cert=TLS / "client.pem", tls_key=TLS / "client.key")
        with client_of(server.address, credentials=own) as client:
            assert client.classify(IMAGE).predictions


def test_the_expiry_of_the_certificate_in_use_is_a_metric(tmp_path: Path) -> None:
    with server_with(tls_options(tmp_path)) as (server, _):
        assert server.metric("prelunet_certificate_expiry_timestamp_seconds") == 4102358400  # 2099-12-31


@pytest.mark.parametrize(
    ("credentials", "message"),
    [
        (lambda _: Credentials(tls_cert=TLS / "client.pem"), "belong together"),
        (lambda folder: Credentials(tls_ca=folder / "none.pem"), "none.pem: cannot be read"),
        (lambda _: Credentials(tls_ca=TLS / "client.key"), "no certificates in PEM form"),
        (lambda _: Credentials(tls_cert=TLS / "client.pem", tls_key=TLS / "ca.key"), "is not the key"),
        (lambda _: Credentials(tls_cert=TLS / "expired.pem", tls_key=TLS / "expired.key"), "expired on 2010-12-31"),
        (lambda folder: Credentials(token_file=folder / "none"), "none: cannot be read"),
        (lambda folder: Credentials(token_file=secret_file(folder / "empty", "")), "empty: not a token"),
        (lambda folder: Credentials(token_file=secret_file(folder / "two", "a b")), "two: not a token"),
        (lambda folder: Credentials(token_file=secret_file(folder / "lines", "a\nb")), "lines: not a token"),
    ],
)
def test_files_that_a_client_cannot_use_are_refused_before_it_connects(
    client_of: Callable[..., Any], tmp_path: Path, credentials: Callable[[Path], Credentials], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        client_of("127.0.0.1:1", credentials=credentials(tmp_path))
    assert "a b" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("ipv4:127.0.0.1:50051", True),
        ("unix:/run/prelunet.sock", True),
        ("10.0.0.7:50051", False),
        ("dns:///prelunet:50051", False),
        ("localhost.example.org:50051", False),
        ("ipv4:127.0.0.1:50051,10.0.0.7:50051", False),
        ("ipv4:10.0.0.7:50051,127.0.0.1:50051", False),
        ("dns://10.0.0.7/localhost:50051", False),
    ],
)
def test_a_token_is_sent_without_tls_only_to_this_machine(tmp_path: Path, address: str, local: bool) -> None:
    credentials = Credentials(token_file=secret_file(tmp_path / "token", "s3cret"))
    if local:
        AsyncClient(address, credentials=credentials)
    else:
        with pytest.raises(UsageError, match="without TLS, others on the network could read the token"):
            AsyncClient(address, credentials=credentials)
    AsyncClient(address, credentials=replace(credentials, insecure=True))
    AsyncClient(address, credentials=replace(credentials, tls=True))


def test_a_token_that_others_may_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = secret_file(tmp_path / "token", "s3cret")
    for mode, warnings in ((0o600, 0), (0o640, 0), (0o644, 1), (0o620, 1), (0o602, 1)):
        token.chmod(mode)
        caplog.clear()
        AsyncClient("127.0.0.1:1", credentials=Credentials(token_file=token))
        assert [f"may read or change {token}" in record.getMessage() for record in caplog.records] == warnings * [True]


def test_paths_may_be_given_as_text() -> None:
    authorities: Any = str(TLS / "ca.pem")
    assert Credentials(tls_ca=authorities) == TRUSTING


# Tokens.


def call(address: str, method: str, *authorizations: str) -> grpc.RpcError | None:
    """Call a method without a message; return its error."""
    metadata = tuple(("authorization", each) for each in authorizations)
    with grpc.insecure_channel(address) as channel:
        try:
            list(channel.stream_stream(method)(iter(()), metadata=metadata, timeout=20))
        except grpc.RpcError as error:
            return error
    return None


CREDENTIAL_CODES = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}


def code_of_call(address: str, method: str, *authorizations: str) -> grpc.StatusCode | None:
    error = call(address, method, *authorizations)
    return error.code() if error is not None else None


def test_every_method_needs_a_token_with_its_scope(tmp_path: Path) -> None:
    secrets = write_tokens(tmp_path / "tokens.toml", *((scope, (scope,)) for scope in SCOPES))
    with server_with(AccessOptions(), tmp_path / "tokens.toml") as (server, _):
        for method, required in REQUIRED.items():
            if method.endswith("/Watch") or method.startswith("/prelunet.http/"):  # never ends; of HTTP only
                continue
            without = code_of_call(server.address, method)
            assert (without == grpc.StatusCode.UNAUTHENTICATED) == (required != "nothing"), method
            for scope, secret in zip(SCOPES, secrets, strict=True):
                error = call(server.address, method, f"Bearer {secret}")
                if required in ("nothing", "token", scope):
                    assert error is None or error.code() not in CREDENTIAL_CODES, (method, scope)
                else:
                    assert error is not None
                    assert error.code() == grpc.StatusCode.PERMISSION_DENIED, (method, scope)
                    assert f"it requires the scope '{required}'" in (error.details() or "")


def test_a_method_without_a_rule_is_refused_and_an_unknown_one_is_unimplemented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classify = "/prelunet.v1.PreluNetService/Classify"
    monkeypatch.delitem(REQUIRED, classify)  # as if it were new
    (secret,) = write_tokens(tmp_path / "tokens.toml", ("all", SCOPES))
    with server_with(AccessOptions(), tmp_path / "tokens.toml") as (server, _):
        assert code_of_call(server.address, classify, f"Bearer {secret}") == grpc.StatusCode.PERMISSION_DENIED
        unknown = "/grpc.reflection.v2.ServerReflection/ServerReflectionInfo"  # clients try newer versions first
        assert code_of_call(server.address, unknown, f"Bearer {secret}") == grpc.StatusCode.UNIMPLEMENTED
        assert code_of_call(server.address, unknown) == grpc.StatusCode.UNAUTHENTICATED


def test_the_clients_send_their_token_in_every_call_and_get_errors_of_ours(
    client_of: Callable[..., Any], tmp_path: Path
) -> None:
    classify, evaluate = write_tokens(tmp_path / "tokens.toml", ("alice", ("classify",)), ("bob", ("evaluate",)))
    with server_with(tls_options(tmp_path), tmp_path / "tokens.toml") as (server, _):
        token = secret_file(tmp_path / "token", classify)
        with client_of(server.address, credentials=replace(TRUSTING, token_file=token)) as client:
            assert client.classify(IMAGE).predictions
            assert [model.name for model in client.models()] == ["fake"]
            assert sorted(key for key, answer in client.classify_many([IMAGE] * 3) if answer.predictions) == [0, 1, 2]
            secret_file(token, evaluate)  # read again for each call
            with pytest.raises(PermissionDenied, match=r"token 'bob' may not call .*scope 'classify'"):
                client.classify(IMAGE)
            secret_file(token, "unknown")
            with pytest.raises(Unauthenticated, match="this token is unknown to the server"):
                client.classify(IMAGE)
            token.unlink()
            with pytest.raises(Unauthenticated):  # with the last one
                client.classify(IMAGE)
        with client_of(server.address, credentials=TRUSTING) as client:
            assert client.ready()
            with pytest.raises(Unauthenticated, match=r"requires a token: give the file .*--token-file"):
                client.classify(IMAGE)


def test_a_client_waits_as_long_as_the_rate_of_its_token_requires(tmp_path: Path) -> None:
    (fast, fast_lines), (slow, slow_lines) = (
        create_token(name, ["classify"], rate=rate) for name, rate in (("fast", 20.0), ("slow", 0.01))
    )
    (tmp_path / "tokens.toml").write_text(fast_lines + slow_lines)
    with server_with(AccessOptions(), tmp_path / "tokens.toml") as (server, _):
        begun = time.monotonic()
        with Client(server.address, credentials=Credentials(token_file=secret_file(tmp_path / "fast", fast))) as client:
            for _ in range(30):
                client.classify(IMAGE)
        assert time.monotonic() - begun > 9 / 20  # 20 at once, and one of the other 10 each twentieth of a second
        slow_credentials = Credentials(token_file=secret_file(tmp_path / "slow", slow))
        with Client(server.address, credentials=slow_credentials, retries=False) as hasty:
            hasty.classify(IMAGE)
            with pytest.raises(Overloaded, match=r"token 'slow' may make 0\.01 calls per second"):
                hasty.classify(IMAGE)


def test_no_log_line_metric_or_error_has_a_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = write_tokens(tmp_path / "tokens.toml", ("alice", ("classify",)), ("bob", ("evaluate",)))
    credentials = [
        Credentials(token_file=secret_file(tmp_path / str(number), secret)) for number, secret in enumerate(secrets)
    ]
    unknown = "z" * 43
    credentials.append(Credentials(token_file=secret_file(tmp_path / "unknown", unknown)))
    texts = [repr(credentials)]
    with server_with(AccessOptions(), tmp_path / "tokens.toml") as (server, reload):
        for each in credentials:
            with Client(server.address, credentials=each, retries=False) as client:
                try:
                    texts.append(repr(client.classify(IMAGE)))
                except (PermissionDenied, Unauthenticated) as error:
                    texts += [str(error), repr(error), str(error.__cause__)]
        (tmp_path / "tokens.toml").write_text("".join(f"[{secret}]\n" for secret in secrets) + "x")
        reload()
        texts.append(server.models.metrics.text()[0].decode())
    for formatter in (JsonFormatter(), TextFormatter()):
        texts += [formatter.format(record) for record in caplog.records]
    assert "token:alice" in "".join(texts), "the name is logged"
    assert "not used" in "".join(texts), "the broken file is logged"
    assert not [text for text in texts for secret in (*secrets, unknown) if secret in text]


def test_health_and_probes_need_no_token_and_work_over_tls(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.toml", ("alice", ("classify",)))
    with (
        server_with(tls_options(tmp_path), tmp_path / "tokens.toml") as (server, _),
        grpc.secure_channel(server.address, grpc.ssl_channel_credentials((TLS / "ca.pem").read_bytes())) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=20).status == 1
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert next(watch).status == 1
        watch.cancel()
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            channel.unary_unary("/prelunet.v1.PreluNetService/ListModels")(
                pb.ListModelsRequest().SerializeToString(), timeout=20
            )
