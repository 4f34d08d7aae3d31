"""The command line: help, exit codes, and what is printed where."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

import prelunet
from prelunet.evaluator.cli import VERBS, run
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.terminal import echo, escape_unprintable
from tests.conftest import ExportedNet

ROOT = Path(__file__).parents[2]
PACKAGE = Path(prelunet.__file__).parent


def test_help_lists_every_verb_and_imports_none_of_them() -> None:
    heavy = {"numpy", "torch", "onnx", "onnxruntime", "grpc", "PIL", "scipy", "jinja2", "rich", "importlib.metadata"}
    code = "import sys; from prelunet.evaluator.cli import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(result.stderr.split())
    for verb in VERBS:
        assert f"  {verb} " in result.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"prelunet {verb}" in out
    assert len(out.splitlines()) > 5


def test_the_entry_points_are_those_that_the_verbs_are_found_by() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["prelunet.verbs"].keys() == {
        name for name, verb in VERBS.items() if verb.entry_point
    }


def test_a_misspelled_verb_is_refused_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["valdate"]) == 2
    assert "valdate" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"prelunet {metadata.version('prelunet')}\n"


FailWith = Callable[[BaseException], None]


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch) -> FailWith:
    """Return a function that makes the verb `report` raise an error."""

    def replace_verb(error: BaseException) -> None:
        def verb() -> None:
            raise error

        monkeypatch.setattr("prelunet.evaluator.verbs.report.report", verb)

    return replace_verb


def test_a_verb_whose_extra_is_missing_names_the_extra(fail_with: FailWith, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert run(["report"]) == 5
    assert "pip install '.[train]'" in capsys.readouterr().err


def test_a_bug_is_not_reported_as_a_user_error(fail_with: FailWith) -> None:
    fail_with(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        run(["report"])


def test_an_error_becomes_one_line_and_its_exit_code(fail_with: FailWith, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(EnvironmentFault("the disk is full"))
    assert run(["report"]) == 5
    assert capsys.readouterr().err == "prelunet: the disk is full\n"


CONTROLLING = "a\x1b]0;title\x07b\x9b31m\u2028\u202ec\udcff\x7f\rd"
ESCAPED = r"a\x1b]0;title\x07b\x9b31m\u2028\u202ec\udcff\x7f\x0dd"


def test_control_characters_are_escaped_and_our_own_newlines_kept(
    fail_with: FailWith, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(EnvironmentFault(f"{CONTROLLING}\nin two lines, naïve 鯛"))
    assert run(["report"]) == 5
    assert capsys.readouterr().err == f"prelunet: {ESCAPED}\nin two lines, naïve 鯛\n"
    echo(f"{CONTROLLING}\n", end="")
    assert capsys.readouterr().out == f"{ESCAPED}\n"
    assert escape_unprintable("a\nb\tc") == r"a\x0ab\x09c"


def test_the_parsers_errors_are_escaped_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "run", CONTROLLING]) == 2
    assert not set(capsys.readouterr().err) & set("\x1b\x9b\u2028\u202e\x07")


def test_every_verb_prints_through_echo() -> None:
    layers = ("evaluator", "training", "export")
    verbs = [path for layer in layers for path in (PACKAGE / layer / "verbs").rglob("*.py")]
    assert len(verbs) > len(VERBS)
    assert [path.name for path in verbs if re.search(r"typer\.echo|(?<![.\w])print\(", path.read_text())] == []


def test_running_out_of_memory_is_an_environment_fault(fail_with: FailWith, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(MemoryError())
    assert run(["report"]) == 5
    assert "out of memory" in capsys.readouterr().err


def test_after_an_interrupt_the_message_says_that_the_same_command_resumes(
    fail_with: FailWith, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(KeyboardInterrupt())
    assert run(["report"]) == 4
    assert "same command" in capsys.readouterr().err


def test_a_closed_pipe_ends_the_program_quietly(exported: dict[str, ExportedNet]) -> None:
    images = [str(ROOT / "tests" / "data" / "hostile" / "grey-16-bit.png"), "-"]
    command = ["classify", "--model", str(exported["demo-image"].path), "--device", "cpu", "--json", *images]
    code = "import sys; from prelunet.evaluator.cli import main; main(sys.argv[1:])"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as it is for users
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, *command], env=buffered, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["file"] == images[0]
        process.stdout.close()  # as `| head -1` does; the second image, for which it waits, arrives only now
        process.stdin.write(Path(images[0]).read_bytes())
        process.stdin.close()
        err = process.stderr.read().decode()
        assert process.wait(60) == 0, err
    assert re.fullmatch(r"demo\.onnx: .*\n", err), "nothing but the message at the start"


@pytest.mark.parametrize("option", ["--server", "--name", "--protocol"])
def test_an_option_that_is_not_utf8_is_refused_with_its_text(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"--server": "127.0.0.1:1", option: "\udcff"}
    picture = str(ROOT / "tests" / "data" / "hostile" / "grey-16-bit.png")
    assert run(["classify", picture, *(word for pair in options.items() for word in pair)]) == 2
    assert r"\udcff" in capsys.readouterr().err
