"""Where the options of `serve` come from: flag before environment before file before default."""

import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.errors import DeviceLost
from prelunet.evaluator.serving.lifecycle import ServeResult
from prelunet.evaluator.serving.options import (
    AccessOptions,
    HttpOptions,
    QueueOptions,
    ServedImageLimits,
    ServeOptions,
    ServerLimits,
)
from prelunet.evaluator.serving.proxies import TrustedProxies
from prelunet.evaluator.verbs import serve as serve_verb
from tests.serving.conftest import Served

ROOT = Path(__file__).parents[2]
MODEL = ("--model", "demo=demo.onnx")


@pytest.fixture(autouse=True)
def _logging_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave this process's logging as it is: the verb would replace all handlers of the root logger."""
    monkeypatch.setattr(serve_verb, "configure_logging", lambda *_: None)


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "serve.toml"
        path.write_text(text)
        return str(path)

    return write


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["serve", *arguments]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_without_options_everything_has_its_default(served: Served) -> None:
    options = served(*MODEL)
    assert options == ServeOptions(options.models)
    assert (options.queue, options.limits) == (QueueOptions(), ServerLimits())


def test_a_missing_model_file_is_reported_before_any_other_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    existing = tmp_path / "a.onnx"
    existing.write_bytes(b"not a model, which would be found out later")
    errors = refused(capsys, "--model", f"a={existing}", "--model", f"b={tmp_path}/typo.onnx")
    assert f"--model b={tmp_path}/typo.onnx: cannot be read" in errors


def test_every_option_reaches_the_server_in_its_unit(served: Served) -> None:
    options = served(
        *MODEL, "--host", "[::1]", "--port", "1", "--queue-views", "2", "--queue-bytes", "3", "--batch-wait", "4",
        "--max-image-bytes", "5", "--max-image-pixels", "6", "--max-calls", "7", "--max-connections", "8",
        "--max-streams", "9", "--handshake-timeout", "10", "--keepalive", "11", "--max-connection-age", "12",
        "--lame-duck", "13", "--grace", "14", "--metrics-port", "15", "--memory-limit", "1G", "--gpu-memory-limit",
        "2G", "--device", "cpu", "--threads", "3", "--stream-idle-timeout", "16", "--arriving-bytes", "17",
        "--client-address-key", "x-forwarded-for", "--trusted-proxies", "10.0.0.0/8,fd00::/8", "--trusted-proxies",
        "127.0.0.1", "--tls-cert", "c.pem", "--tls-key", "c.key", "--tls-client-ca", "ca.pem", "--token-file", "t.toml",
        "--insecure", "--http-port", "18", "--http-host-names", "a.example.org,b_1", "--http-host-names", "*.c",
        "--http-keep-alive", "19", "--decode-processes", "20",
    )  # fmt: skip
    assert options.http == HttpOptions(18, ("a.example.org", "b_1", "*.c"), keep_alive=19)
    assert options.access == AccessOptions(Path("c.pem"), Path("c.key"), Path("ca.pem"), Path("t.toml"), insecure=True)
    assert (options.host, options.port, options.metrics_port) == ("::1", 1, 15)
    assert options.queue == QueueOptions(2, 3, batch_wait=0.004, decode_processes=20)
    assert options.limits == ServerLimits(
        image=ServedImageLimits(5, 6), max_calls=7, max_connections=8, max_streams=9, handshake_timeout=10,
        keepalive=11, max_connection_age=12, stream_idle_timeout=16, arriving_bytes=17,
        proxies=TrustedProxies("x-forwarded-for", tuple(map(ip_network, ("10.0.0.0/8", "fd00::/8", "127.0.0.1")))),
    )  # fmt: skip
    assert (options.lame_duck, options.grace) == (13, 14)
    assert (options.placement.memory, options.placement.gpu_memory, options.placement.threads) == (2**30, 2**31, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--client-address-key", "x-real-ip"], "belong together: give both"),
        (["--trusted-proxies", "10.0.0.0/8"], "belong together: give both"),
        (["--tls-cert", "c.pem"], "--tls-cert and --tls-key belong together"),
        (["--tls-key", "c.key"], "--tls-cert and --tls-key belong together"),
        (["--tls-client-ca", "ca.pem"], "--tls-client-ca requires TLS"),
        (
            ["--trusted-proxies", "10.0.0.1/8", "--client-address-key", "k"],
            "10.0.0.1/8 has host bits set. Give",
        ),
        (["--http-host-names", "flowers.example.org:8000"], "'flowers.example.org:8000' is not a host name"),
        (["--http-host-names", "a.example.org,"], "'' is not a host name"),
        (["--http-host-names", "*"], "'*' is not a host name"),
        (["--http-host-names", "a*.example.org"], "or *.example.org for all below example.org"),
        (["--trusted-proxies", "proxy", "--client-address-key", "k"], "'proxy' does not appear to be an IPv4 or IPv6"),
        (["--trusted-proxies", "::/0", "--client-address-key", "X-Real-IP"], "X-Real-IP: not a metadata key of text"),
        (["--trusted-proxies", "::/0", "--client-address-key", "ip-bin"], "ip-bin: not a metadata key of text"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, *MODEL, *arguments)


def test_the_log_has_the_requested_form_and_level(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    configured: list[tuple[str, str]] = []
    monkeypatch.setattr(serve_verb, "configure_logging", lambda *arguments: configured.append(arguments))
    served(*MODEL)
    served(*MODEL, "--log-format", "json", "--log-level", "debug")
    assert configured == [("text", "INFO"), ("json", "DEBUG")]


def test_a_flag_wins_over_the_environment_which_wins_over_the_file_which_wins_over_the_default(
    served: Served, config: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config("port = 1\nmax-calls = 1\nmax-streams = 1\n")
    assert served(*MODEL).port == ServeOptions.port
    for name in ("PORT", "MAX_CALLS"):
        monkeypatch.setenv(f"PRELUNET_SERVE_{name}", "2")
    options = served(*MODEL, "--config", path, "--port", "3")
    assert (options.port, options.limits.max_calls, options.limits.max_streams) == (3, 2, 1)
    assert options.limits.max_connections == ServerLimits.max_connections


def test_models_may_be_given_in_the_file_and_in_the_environment(
    served: Served, config: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config('model = ["a=a b.onnx", "b=b.onnx"]\n')
    assert [(file.name, file.path.name) for file in served("--config", path).models] == [
        ("a", "a b.onnx"),
        ("b", "b.onnx"),
    ]
    monkeypatch.setenv("PRELUNET_SERVE_CONFIG", path)
    assert len(served().models) == 2
    monkeypatch.setenv("PRELUNET_SERVE_MODEL", "c=c.onnx d=d.onnx")
    assert [file.name for file in served().models] == ["c", "d"]
    assert [file.name for file in served("--model", "e=e.onnx").models] == ["e"]


def test_the_variable_of_an_option_is_its_flag_in_capitals(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    pairs = re.findall(r"--([a-z-]+) (?:(?!--[a-z]).)*?\[env var: (PRELUNET_SERVE_\w+)", help_text)
    assert len(pairs) > 20
    assert [variable for _, variable in pairs] == [
        f"PRELUNET_SERVE_{flag.replace('-', '_').upper()}" for flag, _ in pairs
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-cals = 1", r"unknown option 'max-cals'\. Valid options: model, models, strict, host, port, .*max-calls"),
        ("max_calls = 1", r"unknown option 'max_calls'"),
        ("config = 'x'", r"unknown option 'config'"),
        ("[limits]\nmax-calls = 1", r"unknown option 'limits'"),
        ("port = 'x'", r"serve\.toml: port is 'x': .*integer"),
        ("port = 1.5", r"serve\.toml: port is '1\.5': .*integer"),
        ("port = true", r"serve\.toml: port is 'true': .*integer"),
        ("port = 70000", r"serve\.toml: port is '70000': .*65535"),
        ("max-image-pixels = 60_000_000", r"max-image-pixels is '60000000': .*59652323"),  # a third of Pillow's limit
        ("port = [1]", r"serve\.toml: port: expected one value, not a list"),
        ("port = 2020-01-01", r"serve\.toml: port: expected a string, a number"),
        ("device = 'tpu'", r"serve\.toml: device is 'tpu': .*openvino"),
        ("model = [['a=b']]", r"serve\.toml: model: expected a string"),
        ("port = ", r"serve\.toml: invalid TOML"),
        ("\0", r"invalid TOML"),
    ],
)
def test_an_invalid_file_is_refused_with_the_name_of_the_option(
    config: Callable[[str], str], capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert re.search(message, refused(capsys, *MODEL, "--config", config(text)))


def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    found = refused(capsys, *MODEL, "--config", "nowhere.toml")
    assert "nowhere.toml: cannot be read (No such file or directory). Give --config the path" in found


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PORT", "x", r"environment variable PRELUNET_SERVE_PORT is 'x': .*integer"),
        ("GRACE", "-1", r"environment variable PRELUNET_SERVE_GRACE is '-1': .*0"),
        ("MAX_CALS", "1", r"variable PRELUNET_SERVE_MAX_CALS: no such option .*MAX_CALLS"),
        ("PORT", "tcp://10.0.0.1:50051", r"integer\. Kubernetes sets this .* enableServiceLinks: false"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"PRELUNET_SERVE_{variable}", value)
    assert re.search(message, refused(capsys, *MODEL))


def test_the_variables_that_kubernetes_sets_for_a_service_of_our_name_are_ignored(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in ("", "METRICS_", "OTHER_"):
        for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT_50051_TCP", "PORT_50051_TCP_ADDR"):
            monkeypatch.setenv(f"PRELUNET_SERVE_{service}{name}", "10.0.0.1")
        monkeypatch.setenv(f"PRELUNET_SERVE_{service}PORT", "tcp://10.0.0.1:50051")
    assert served(*MODEL, "--port", "0", "--metrics-port", "0").port == 0


def test_a_wrong_flag_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Invalid value for '--port': " in refused(capsys, *MODEL, "--port", "x")
    assert "no model to serve; give at least one: --model NAME=MODEL.onnx" in refused(capsys)


def test_the_configuration_is_shown_as_an_equivalent_file_with_the_source_of_each_value(
    served: Served,
    config: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = config('host = "10.0.0.1"\nlame-duck = 1.5\n')
    monkeypatch.setenv("PRELUNET_SERVE_MAX_CALLS", "7")
    arguments = ["--model", 'a=strange "name"\\.onnx', "--grace", "3", "--config", path, "--memory-limit", "2G"]
    assert run(["serve", *arguments, "--show-config"]) == 0
    shown = capsys.readouterr().out
    for line in (
        'host = "10.0.0.1"  # ' + re.escape(path), "grace = 3.0  # command line", "port = 50051  # default",
        "max-calls = 7  # PRELUNET_SERVE_MAX_CALLS", "# precision is not set",
    ):  # fmt: skip
        assert re.search(f"^{line}$", shown, re.MULTILINE), shown
    expected = served(*arguments)
    monkeypatch.delenv("PRELUNET_SERVE_MAX_CALLS")
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert served("--config", str(again)) == expected
    assert "config" not in tomllib.loads(shown)


def test_nothing_is_loaded_when_the_configuration_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--model", "a=nowhere.onnx", "--show-config"]) == 0
    assert 'model = ["a=nowhere.onnx"]' in capsys.readouterr().out
    assert run(["serve", "--show-config"]) == 0
    assert capsys.readouterr().out.startswith(
        "# model is not set\n# models is not set\nstrict = false  # default\nhost = "
    )


def test_the_help_lists_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    for part in (
        "Exits 0 after a signal, 2 for an invalid option",
        "3 for a file that is not a model",
        "5 if the port",
    ):
        assert part in help_text


def test_the_exit_code_is_how_the_server_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ending(ended: ServeResult) -> None:
        async def serve(_options: ServeOptions, _report: Any) -> ServeResult:
            return ended

        monkeypatch.setattr(serve_verb, "serve_until_stopped", serve)

    monkeypatch.setattr(serve_verb, "require_files", lambda _: None)
    ending(ServeResult())
    assert run(["serve", *MODEL]) == 0
    assert capsys.readouterr().out == "stopped; no call was lost\n"
    ending(ServeResult(unfinished=3))
    assert run(["serve", *MODEL, "--grace", "2"]) == 0
    assert capsys.readouterr().out == "stopped; calls cut off: 3\n"
    ending(ServeResult(lost=DeviceLost("the GPU is gone")))
    assert run(["serve", *MODEL]) == 5
    assert capsys.readouterr() == ("", "prelunet: the GPU is gone\n")
    left: list[int] = []
    monkeypatch.setattr(serve_verb.os, "_exit", left.append)
    ending(ServeResult(stuck=True))
    run(["serve", *MODEL])
    assert "abandoned" in capsys.readouterr().err
    ending(ServeResult(stuck=True, lost=DeviceLost("the GPU is gone")))
    run(["serve", *MODEL])
    assert left == [0, 5]


def test_the_end_of_a_server_closes_no_handler_of_another_library(served: Served) -> None:
    closed: list[bool] = []

    class OfALibrary(logging.Handler):  # absl's handler closes its stream, even one that it does not own
        def close(self) -> None:
            closed.append(True)
            super().close()

    handler = OfALibrary()
    served(*MODEL)
    assert not closed
    handler.close()


def test_a_signal_while_the_server_starts_ends_it_without_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "m.onnx").touch()

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_verb, "serve_until_stopped", interrupted)
    assert run(["serve", "--model", f"m={tmp_path / 'm.onnx'}", "--processes", "1"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("module", ["typer", "prelunet.evaluator.verbs.serve", "grpc"])
def test_sigterm_during_the_imports_of_a_server_ends_it_with_0(module: str) -> None:
    script = (
        "import os, signal, sys\n"
        "class Signaller:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Signaller())\n"
        "from prelunet.evaluator.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "serve", "--model", "m=missing.onnx"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
