"""The one import package `prelunet`; check_install.sh tries the installed wheel."""

import pickle
import re
import subprocess
import sys
import tomllib
import traceback
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import prelunet
from prelunet.evaluator import errors

ROOT = Path(__file__).parents[2]


def run(program: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in the root of the checkout, where our folders lie beside it."""
    command = [sys.executable, *flags, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not (ROOT / "evaluator").is_dir(), reason="a source distribution holds these folders only in src")
@pytest.mark.parametrize("folder", ["evaluator", "export", "training"])
def test_a_folder_of_the_checkout_cannot_be_imported_beside_the_package(folder: str) -> None:
    done = run(f"import {folder}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: import prelunet.{folder} instead of {folder}"


def test_the_package_gives_everything_public_by_name() -> None:
    done = run("from prelunet import *; print(AsyncClient, Client, __version__, compare.__name__, load.__name__)", "-P")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{prelunet.AsyncClient} {prelunet.Client} {prelunet.__version__} compare load\n"


def test_every_error_has_a_name_in_the_package_which_its_traceback_shows() -> None:
    for kind in (errors.PreluNetError, *errors.ERROR_STATUSES):
        assert getattr(prelunet, kind.__name__) is kind
        assert kind.__name__ in prelunet.__all__
        assert traceback.format_exception_only(kind("text")) == [f"prelunet.{kind.__name__}: text\n"]
    lost = pickle.loads(pickle.dumps(errors.ImageError("lost")))
    assert (type(lost), str(lost)) == (errors.ImageError, "lost")


USER = """
import prelunet

def names(net: prelunet.Net, paths: list[str]) -> list[str]:
    answers: list[prelunet.Classified] = net.classify(paths)
    best: list[prelunet.Prediction] = [answer.predictions[0] for answer in answers]
    return [prediction.name for prediction in best]

def worse(net: prelunet.Net) -> prelunet.Comparison | None:
    try:
        evaluation: prelunet.Evaluation = net.evaluate("data")
    except prelunet.DatasetError as error:
        print(error)
        return None
    return prelunet.compare("runs/old", evaluation)

names(prelunet.load(1), [])
prelunet.load("model.onnx").session
"""


def test_mypy_checks_a_users_program_against_the_public_names(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    first, second, *_ = done.stdout.splitlines()
    assert 'Argument 1 to "load" has incompatible type "int"' in first, done.stdout
    assert '"Net" has no attribute "session"' in second
    assert "Found 2 errors" in done.stdout


def test_code_after_a_release_has_a_development_version_so_that_pip_replaces_the_release() -> None:
    """Between releases CHANGELOG.md has the section Unreleased; CITATION.cff names the latest release."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released, date = re.findall(r"^## (\d\S*) – (\S+)$", changelog, re.MULTILINE)[0]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (str(cited["version"]), str(cited["date-released"])) == (released, date)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert prelunet.__version__ == version, "the environment is older than the checkout: make .venv/with-dev"
    if "## Unreleased" in changelog:
        assert Version(version).is_devrelease
        assert Version(version) > Version(released)
    else:
        assert version == released


def test_a_shell_completes_the_public_names() -> None:
    assert dir(prelunet) == sorted(prelunet.__all__)


def test_importing_the_package_loads_no_library_and_a_wrong_name_is_an_attribute_error() -> None:
    done = run("import sys; before = set(sys.modules); import prelunet; print(*set(sys.modules) - before)", "-P")
    assert not {"grpc", "numpy", "prelunet.evaluator"} & set(done.stdout.split()), done.stdout
    assert "prelunet" in done.stdout.split()
    with pytest.raises(AttributeError, match="module 'prelunet' has no attribute 'Cleint'"):
        _ = prelunet.Cleint
