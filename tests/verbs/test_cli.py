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
from prelunet.evaluator.errors import EnvironmentFault, install_hint
from prelunet.evaluator.terminal import echo, escape_unprintable
from tests.conftest import ExportedNet

ROOT = Path(__file__).parents[2]
PACKAGE = Path(prelunet.__file__).parent
KERAS = ["keras-tf", "keras-caffe"]


def test_help_lists_every_verb_and_imports_none_of_them() -> None:
    heavy = {"numpy", "torch", "onnx", "onnxruntime", "grpc", "PIL", "scipy", "jinja2", "rich", "importlib.metadata"}
    code = "import sys; from prelunet.evaluator.cli import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(result.stderr.split())
    for verb in VERBS:
        assert f"  {verb} " in result.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_in_the_long_and_the_short_form(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"prelunet {verb}" in out
    assert len(out.splitlines()) > 5
    assert run([verb, "-h"]) == 0
    assert capsys.readouterr().out == out


def sections(text: str) -> dict[str, str]:
    """Return the text of a help page under each of its headings."""
    parts = re.split(r"^(\S.*):$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(
    ("verb", "groups"),
    [
        ("validate", {"Options": ["--data", "--run"], "Protocol": ["--protocol", "--scales"],
                      "Device": ["--device", "--threads", "--gpus"], "Ray cluster": ["--ray-workers"]}),
        ("serve", {"Options": ["--port"], "Device": ["--precision"], "Queue": ["--queue-views"],
                   "Limits on clients": ["--max-calls", "--max-image-pixels"], "Proxies": ["--trusted-proxies"]}),
        ("train", {"Options": ["--recipe"], "Execution": ["--workers"]}),
        ("adopt", {"Options": ["--crop", "--classes"], "Preprocessing": ["--preset", "--mean"]}),
        ("evaluate", {"Options": ["--net", "--run"], "Preprocessing": ["--preset"], "Device": ["--device"]}),
    ],
)  # fmt: skip
def test_help_groups_options_after_those_of_no_group(
    verb: str, groups: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([verb, "--help"]) == 0
    found = sections(capsys.readouterr().out)
    assert next(heading for heading in found if heading != "Arguments") == "Options"
    for group, options in groups.items():
        for option in options:
            assert [name for name, text in found.items() if re.search(rf"{option}\b(?!-)", text)] == [group], option


@pytest.mark.parametrize(
    ("verb", "old"),
    [("validate", "--run"), ("merge", "--run"), ("ensemble", "--run"), ("train", "--out"), ("report", "--out"),
     ("compare", "--out"), ("submission", "--out"), ("inspect", "--plot"), ("classify", "--heatmap"), ("bench", ""),
     ("init", ""), ("import", ""), ("export", ""), ("adopt", ""), ("evaluate", "--run")],
)  # fmt: skip
def test_what_a_verb_writes_is_named_by_output_and_by_the_name_that_it_had(
    verb: str, old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([verb, "--help"]) == 0
    assert f"  -o, {', '.join(filter(None, [old, '--output']))} " in capsys.readouterr().out


def test_the_entry_points_are_those_that_the_verbs_are_found_by() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["prelunet.verbs"].keys() == {
        name for name, verb in VERBS.items() if verb.entry_point
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["valdate"], "No such command 'valdate'. Did you mean 'validate', 'evaluate'?"),
        (["report", "run", "--ouput", "x"], "No such option: --ouput (Possible options: --out, --output)"),
        (["adopt", "net.onnx", "--preset", "pytorch"], "'pytorch' is not one of 'torchvision', 'timm'"),
    ],
)
def test_a_misspelled_verb_option_or_choice_is_refused_with_the_right_ones(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["validate"], ["report"], ["bench", "--limit", "x"], ["report", "a", "b"], ["--bogus"], ["valdate"]]
)
def test_a_wrong_command_line_is_one_line_that_names_the_help(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    out, err = capsys.readouterr()
    verb = f" {words[0]}" if words[0] in VERBS else ""
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("prelunet: ")
    assert err.endswith(f" See prelunet{verb} --help\n")


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert run([]) == 2
    assert capsys.readouterr() == ("", shown)


@pytest.mark.parametrize(
    ("words", "completed"),
    [("prelunet val", ["validate"]), ("prelunet adopt --pre", ["--preset"]), ("prelunet adopt --preset ker", KERAS)],
)
def test_a_shell_completes_verbs_options_and_choices(words: str, completed: list[str]) -> None:
    code = "from prelunet.evaluator.cli import main; main()"
    line = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_PRELUNET_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env={**os.environ, **line}, capture_output=True, text=True
    )
    assert (done.stdout.split(), done.stderr) == (completed, "")


def test_words_anywhere_among_the_options_are_model_and_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb(*, model: str = "", data: str = "", limit: int = 0) -> None:
        received.append((model, data, limit))

    received: list[tuple[str, str, int]] = []
    monkeypatch.setattr("prelunet.evaluator.verbs.bench.bench", verb)
    for words in (["--model=m", "--data=d"], ["m", "d"], ["m", "--data", "d"], ["--data", "d", "m"]):
        assert run(["bench", *words]) == 0
    for line in ("m d --limit 3", "--limit 3 m d", "m --limit=3 d", "--limit 3 -- m d"):
        assert run(["bench", *line.split()]) == 0
    assert received == [*[("m", "d", 0)] * 4, *[("m", "d", 3)] * 4]
    assert run(["bench", "m", "d", "--data=e"]) == 2
    assert capsys.readouterr().err == "prelunet: d: --data is given too. Give one of them\n"
    assert run(["bench", "m", "d", "third"]) == 2
    assert "third" in capsys.readouterr().err
    assert run(["bench", "--help"]) == 0
    assert "prelunet bench [OPTIONS] [MODEL] [DATA]" in capsys.readouterr().out


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


@pytest.mark.parametrize(("module", "extra"), [("torch", "train"), ("safetensors", "train"), ("onnx.helper", "adopt")])
def test_a_verb_whose_extra_is_missing_names_the_extra(
    module: str, extra: str, fail_with: FailWith, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(ModuleNotFoundError(f"No module named '{module}'", name=module))
    assert run(["report"]) == 5
    assert install_hint(extra) in capsys.readouterr().err


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
