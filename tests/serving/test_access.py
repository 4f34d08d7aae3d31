"""Tokens: the file, the scopes of all methods, and rates."""

import hashlib
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from prelunet.evaluator.errors import Overloaded, PermissionDenied, Unauthenticated, UsageError
from prelunet.evaluator.pb.inference import inference_pb2
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2
from prelunet.evaluator.serving.access import (
    REQUIRED,
    SCOPES,
    AccessControl,
    Token,
    create_token,
    parse_tokens,
)
from prelunet.evaluator.serving.observability.metrics import Metrics
from tests.helpers.tls_files import write_tokens

CLASSIFY, EVALUATE = "/prelunet.v1.PreluNetService/Classify", "/prelunet.v1.PreluNetService/Evaluate"
HASH = hashlib.sha256(b"any").hexdigest()


def entry(name: str = "alice", sha256: str = HASH, rest: str = 'scopes = ["classify"]') -> str:
    return f'[{name}]\nsha256 = "{sha256}"\n{rest}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no token, so every call would be refused"),
        ("# nobody yet", "no token, so every call would be refused"),
        ("[alice\n", "not a TOML file"),
        ("\xff\xfe", "not a TOML file"),
        (entry() + entry(), "Cannot declare ('alice',) twice"),
        (entry() + entry("bob"), r"[bob] has the sha256 of [alice]"),
        (entry(rest='scopes = ["classify", "all"]'), "[alice]: Invalid enum value 'all'"),
        (entry(rest="scopes = []"), "[alice]: Expected `array` of length >= 1"),
        (entry(rest='scopes = "classify"'), "[alice]: Expected `array`, got `str`"),
        (entry(rest=""), "[alice]: Object missing required field `scopes`"),
        (entry(rest='scopes = ["admin"]\nrates = 3'), "[alice]: Object contains unknown field `rates`"),
        (entry(rest='scopes = ["admin"]\nrate = 0'), "[alice]: Expected `float` > 0.0"),
        (entry(rest='scopes = ["admin"]\nrate = nan'), "[alice]: Expected `float` > 0.0"),
        (entry(rest='scopes = ["admin"]\nshare = 1.5'), "[alice]: Expected `float` <= 1.0"),
        (entry(sha256=HASH[:-1]), "[alice]: Expected `str` matching regex"),
        (entry(sha256=HASH.upper()), "[alice]: Expected `str` matching regex"),
        (entry("'two words'"), "[two words]: the name may have only"),
        (entry(rest='scopes = ["admin"]\nrate = inf'), "[alice]: Expected `float` <= 1000000.0"),
        ("alice = 3", "[alice]: Expected `object`, got `int`"),
        (f"alice = {'[' * 10_000}", "not a TOML file"),
    ],
)
def test_a_broken_token_file_is_refused_with_the_token_at_fault(content: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_tokens(Path("tokens.toml"), content.encode("latin-1"))
    assert message in str(caught.value)
    assert str(caught.value).startswith("tokens.toml: ")


def test_a_created_token_is_read_back_and_only_its_hash_is_in_the_file() -> None:
    secret, lines = create_token("alice", ["classify", "admin"], rate=2.5, share=0.25)
    tokens = parse_tokens(Path("x"), lines.encode())
    digest = hashlib.sha256(secret.encode()).hexdigest()
    assert tokens == {"alice": Token(digest, ("classify", "admin"), rate=2.5, share=0.25)}
    assert secret not in lines + repr(tokens)
    assert len({create_token("x", ["admin"])[0] for _ in range(100)}) == 100


@pytest.mark.parametrize("kind", ["missing", "folder", "large"])
def test_a_token_file_that_cannot_be_read_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokens.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(UsageError, match=r"tokens.toml: (cannot be read|larger than)"):
        AccessControl(path)


def test_every_method_of_every_service_has_a_rule() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in (prelunet_pb2, inference_pb2, health_pb2, reflection_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    methods.add("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")  # the same messages
    assert set(REQUIRED) == methods | {"/prelunet.http/Examples", "/prelunet.http/Reports"}


@pytest.mark.parametrize(
    ("method", "allowed"),
    [
        (CLASSIFY, {"classify"}),
        ("/prelunet.v1.PreluNetService/ClassifyStream", {"classify"}),
        ("/inference.GRPCInferenceService/ModelInfer", {"classify"}),
        ("/inference.GRPCInferenceService/ModelStreamInfer", {"classify"}),
        (EVALUATE, {"evaluate"}),
        ("/inference.GRPCInferenceService/RepositoryModelUnload", {"admin"}),
        ("/prelunet.v1.PreluNetService/ListModels", set(SCOPES)),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", set(SCOPES)),
        ("/prelunet.v1.PreluNetService/Invented", set()),
    ],
)
def test_a_method_is_allowed_to_the_scopes_that_it_requires(tmp_path: Path, method: str, allowed: set[str]) -> None:
    secrets = write_tokens(tmp_path / "tokens.toml", *((scope, (scope,)) for scope in SCOPES))
    access = AccessControl(tmp_path / "tokens.toml")
    for scope, secret in zip(SCOPES, secrets, strict=True):
        if scope in allowed:
            name, token = access.check(method, [f"Bearer {secret}"]) or ("", None)
            assert (name, token and token.scopes) == (scope, (scope,))
        else:
            with pytest.raises(PermissionDenied, match=f"token '{scope}' may not call {method[1:]}") as caught:
                access.check(method, [f"Bearer {secret}"])
            assert all(f"requires the scope '{each}'" in str(caught.value) for each in allowed)
    with pytest.raises(Unauthenticated, match="requires a token"):
        access.check(method, [])


def test_the_scheme_is_read_in_any_case(tmp_path: Path) -> None:
    (secret,) = write_tokens(tmp_path / "tokens.toml", ("alice", ("classify",)))
    access = AccessControl(tmp_path / "tokens.toml")
    assert all(access.check(CLASSIFY, [f"{scheme} {secret}"]) for scheme in ("Bearer", "bearer", "BEARER"))


def test_a_token_above_its_rate_is_refused_until_its_calls_are_earned_again(tmp_path: Path) -> None:
    path, now = tmp_path / "tokens.toml", [100.0]
    secret, limited = create_token("limited", ["classify"], rate=4.0)
    other_secret, other = create_token("other", ["classify"])
    path.write_text(limited + other)
    metrics = Metrics()
    access = AccessControl(path, metrics, clock=lambda: now[0])

    waits = set[float]()

    def accepted(calls: int) -> int:
        count = 0
        for _ in range(calls):
            try:
                access.check(CLASSIFY, [f"Bearer {secret}"])
                count += 1
            except Overloaded as error:
                waits.add(round(error.retry_after or 0, 6))
        return count

    assert accepted(9) == 4  # a second's worth at once
    now[0] += 0.5
    assert accepted(5) == 2
    now[0] += 1000.0  # what is not used is not saved up
    assert accepted(9) == 4
    assert metrics.registry.get_sample_value("prelunet_refusals_total", {"model": "", "reason": "rate"}) == 5 + 3 + 5
    assert waits == {0.25}, "a call each quarter of a second, and none of it earned"
    for _ in range(20):
        access.check(CLASSIFY, [f"Bearer {other_secret}"])


def test_refused_calls_do_not_count_for_the_rate_of_a_token_without_the_scope(tmp_path: Path) -> None:
    secret, lines = create_token("alice", ["classify"], rate=1.0)
    (tmp_path / "tokens.toml").write_text(lines)
    access = AccessControl(tmp_path / "tokens.toml", clock=lambda: 0.0)
    for _ in range(3):
        with pytest.raises(PermissionDenied):
            access.check(EVALUATE, [f"Bearer {secret}"])
    assert access.check(CLASSIFY, [f"Bearer {secret}"])


def test_a_change_counts_once_two_looks_agree_and_a_broken_one_never(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path, metrics = tmp_path / "tokens.toml", Metrics()
    (old,) = write_tokens(path, ("alice", ("classify",)))
    access = AccessControl(path, metrics)

    def works(secret: str) -> bool:
        try:
            return access.check(CLASSIFY, [f"Bearer {secret}"]) is not None
        except Unauthenticated:
            return False

    (new,) = write_tokens(path, ("alice", ("classify",)))
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    access.files.poll()
    path.write_text(whole)
    access.files.poll()
    assert works(old), "one look is not enough"
    assert not works(new)
    access.files.poll()
    assert works(new)
    assert not works(old)
    for broken in ("", whole[: len(whole) // 2], whole + whole):
        path.write_text(broken)
        for _ in range(4):
            access.files.poll()
        assert works(new)
    path.unlink()
    for _ in range(4):
        access.files.poll()
    assert works(new)
    refusals = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(refusals) == 4, "each broken state is reported once"
    assert all("the changed tokens are not used, the previous ones stay: " in refusal for refusal in refusals)
    assert "cannot be read (No such file or directory)" in refusals[-1]
    path.write_text(whole)
    for _ in range(2):
        access.files.poll()
    assert works(new)
    reloads = {
        outcome: metrics.registry.get_sample_value("prelunet_reloads_total", {"files": "tokens", "outcome": outcome})
        for outcome in ("loaded", "refused")
    }
    assert reloads == {"loaded": 2, "refused": 4}
