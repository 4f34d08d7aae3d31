"""The program as a user meets it."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from prelunet.evaluator import cli
from prelunet.evaluator.cli import VERBS, run
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.terminal import echo, escape_unprintable
from tests.conftest import ExportedNet

ROOT = Path(__file__).parents[2]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_lists_every_verb_and_imports_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from prelunet.evaluator.cli import run; run(['--help']); "
        "heavy = {'numpy', 'torch', 'onnx', 'onnxruntime', 'grpc', 'PIL', 'scipy', 'jinja2'} & set(sys.modules); "
        "sys.stderr.write(f'heavy: {heavy}')"
    )
    result = python(code)
    assert "heavy: set()" in result.stderr
    for verb in VERBS:
        assert f"  {verb} " in result.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"prelunet {verb}" in out
    assert len(out.splitlines()) > 5


def test_every_entry_point_is_a_verb_and_every_verb_without_target_an_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["prelunet.verbs"].keys() == {name for name, verb in VERBS.items() if not verb.target}


def test_a_misspelt_verb_is_refused_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["valdate"]) == 2
    assert "valdate" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"prelunet {metadata.version('prelunet')}\n"


def test_a_verb_whose_extra_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_name: str) -> object:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "_function_of", missing)
    assert run(["train"]) == 5
    assert "pip install '.[train]'" in capsys.readouterr().err


def test_a_mistake_of_ours_is_not_dressed_up_as_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_name: str) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_function_of", broken)
    with pytest.raises(ZeroDivisionError):
        run(["train"])


def test_an_error_becomes_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_name: str) -> object:
        raise EnvironmentFault("the disk is full")

    monkeypatch.setattr(cli, "_function_of", fails)
    assert run(["report"]) == 5
    assert capsys.readouterr().err == "prelunet: the disk is full\n"


STEERING = "a\x1b]0;title\x07b\x9b31m\u2028\u202ec\udcff\x7f\rd"
WRITTEN_OUT = r"a\x1b]0;title\x07b\x9b31m\u2028\u202ec\udcff\x7f\x0dd"


def test_what_would_steer_the_terminal_is_written_out_and_our_own_lines_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_name: str) -> object:
        raise EnvironmentFault(f"{STEERING}\nin two lines, naïve 鯛")

    monkeypatch.setattr(cli, "_function_of", fails)
    assert run(["report"]) == 5
    assert capsys.readouterr().err == f"prelunet: {WRITTEN_OUT}\nin two lines, naïve 鯛\n"
    echo(f"{STEERING}\n", end="")
    assert capsys.readouterr().out == f"{WRITTEN_OUT}\n"
    assert escape_unprintable("a\nb\tc") == r"a\x0ab\x09c"


def test_the_parsers_own_complaints_do_not_steer_the_terminal_either(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "run", STEERING]) == 2
    assert not set(capsys.readouterr().err) & set("\x1b\x9b\u2028\u202e\x07")


def test_every_verb_prints_through_say() -> None:
    verbs = [path for layer in ("evaluator", "training", "export") for path in (ROOT / layer / "verbs").glob("*.py")]
    assert len(verbs) > len(VERBS)
    assert [path.name for path in verbs if re.search(r"typer\.echo|(?<![.\w])print\(", path.read_text())] == []


def test_memory_that_is_used_up_is_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def greedy(_name: str) -> object:
        raise MemoryError

    monkeypatch.setattr(cli, "_function_of", greedy)
    assert run(["merge"]) == 5
    assert "out of memory" in capsys.readouterr().err


def test_an_interrupt_says_that_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_name: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_function_of", interrupted)
    assert run(["validate"]) == 4
    assert "same command" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_the_program_quietly(exported: dict[str, ExportedNet]) -> None:
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
        process.stdout.close()  # as `| head -1` does; the second image, which it waits for, comes only now
        process.stdin.write(Path(images[0]).read_bytes())
        process.stdin.close()
        told = process.stderr.read().decode()
        assert process.wait(60) == 0, told
    assert re.fullmatch(r"demo\.onnx: .*\n", told), "beside what it said at the start nothing should be said"


def test_no_file_of_the_evaluator_mentions_torch_or_onnx_in_an_import() -> None:
    imports = re.compile(r"^\s*(?:from|import)\s+(torch|onnx|safetensors)\b", re.MULTILINE)
    files = sorted((ROOT / "evaluator").rglob("*.py"))
    assert files
    assert [path.name for path in files if imports.search(path.read_text())] == []


@pytest.mark.parametrize("option", ["--server", "--name", "--protocol"])
def test_an_option_that_is_no_utf8_is_refused_by_its_text(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"--server": "127.0.0.1:1", option: "\udcff"}
    picture = str(ROOT / "tests" / "data" / "hostile" / "grey-16-bit.png")
    assert run(["classify", picture, *(word for pair in options.items() for word in pair)]) == 2
    assert r"\udcff" in capsys.readouterr().err
