"""The error table: every error has its row, and the documentation agrees."""

import errno
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from prelunet.evaluator import errors
from prelunet.evaluator.errors import (
    ERROR_STATUSES,
    INTERNAL,
    EnvironmentFault,
    ErrorStatus,
    PreluNetError,
    UsageError,
    error_status,
    from_os_error,
    install_hint,
)


def kinds_below(kind: type[PreluNetError]) -> set[type[PreluNetError]]:
    found = set(kind.__subclasses__())
    return found.union(*map(kinds_below, found))


KINDS = sorted(kinds_below(PreluNetError), key=lambda kind: kind.__name__)
assert KINDS, "no errors found"


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_a_row_in_the_table(kind: type[PreluNetError]) -> None:
    assert kind in ERROR_STATUSES


@pytest.mark.parametrize("kind", KINDS)
def test_every_status_exists_in_grpc(kind: type[PreluNetError]) -> None:
    assert ERROR_STATUSES[kind].grpc_status in grpc.StatusCode.__members__


@pytest.mark.parametrize("kind", KINDS)
def test_docs_state_the_exit_code_and_status_of_every_error(kind: type[PreluNetError]) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "errors.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("|") and re.search(rf"\b{kind.__name__}\b", line)]
    _, _, code, status, http, _ = (cell.strip() for cell in row.split("|"))
    assert ErrorStatus(int(code), status, int(http)) == ERROR_STATUSES[kind]


def test_a_subclass_of_an_error_gets_the_row_of_its_parent() -> None:
    class Finer(errors.ImageError):
        pass

    assert error_status(Finer("x")) == ERROR_STATUSES[errors.ImageError]


def test_any_other_exception_is_internal() -> None:
    assert error_status(ZeroDivisionError()) == INTERNAL
    assert INTERNAL.exit_code == 1


@pytest.mark.parametrize("code", [errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG])
def test_a_wrong_path_is_reported_with_its_fix(code: int) -> None:
    reported = from_os_error(OSError(code, "Odd", "runs/a"))
    assert isinstance(reported, UsageError)
    assert str(reported).startswith("runs/a: ")
    assert "; " in str(reported)
    assert "give" in str(reported)


def test_a_full_disk_is_an_environment_fault_and_a_missing_file_a_usage_error() -> None:
    full = from_os_error(OSError(errno.ENOSPC, "No space left on device", "runs/a"))
    assert isinstance(full, EnvironmentFault)
    assert "runs/a" in str(full)
    assert "free some space" in str(full)
    missing = from_os_error(OSError(errno.ENOENT, "No such file or directory", "photo.jpg"))
    assert isinstance(missing, UsageError)
    assert "photo.jpg" in str(missing)


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        (None, "pip install 'prelunet[train]'"),
        ({"url": "file://HERE/my%20checkout", "dir_info": {"editable": True}},
         "pip install -e 'HERE/my checkout[train]'"),
        ({"url": "file://HERE/my%20checkout", "dir_info": {}}, "pip install 'HERE/my checkout[train]'"),
        ({"url": "file:///gone", "dir_info": {}}, "pip install 'prelunet[train]'"),
        ({"url": "https://b.org/prelunet", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}},
         "pip install 'prelunet[train] @ git+https://b.org/prelunet@1a2b'"),
        ({"url": "https://b.org/prelunet-9-py3-none-any.whl", "archive_info": {}},
         "pip install 'prelunet[train] @ https://b.org/prelunet-9-py3-none-any.whl'"),
    ],
    ids=["an index", "an editable checkout", "a checkout", "a folder that is gone", "a repository", "a wheel"],
)  # fmt: skip
def test_a_missing_extra_is_installed_from_where_prelunet_came_from(
    direct_url: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "prelunet-9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.4\nName: prelunet\nVersion: 9\n")
    if direct_url is not None:
        (installed / "direct_url.json").write_text(json.dumps(direct_url).replace("HERE", str(tmp_path)))
    (tmp_path / "my checkout").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert install_hint("train") == command.replace("HERE", str(tmp_path))
