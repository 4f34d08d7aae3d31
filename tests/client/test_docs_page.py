"""docs/client.md: its examples run, and its table of errors is what the clients do."""

import re
from dataclasses import fields
from pathlib import Path

import grpc
import pytest

from prelunet.evaluator import errors
from prelunet.evaluator.client import Client, RetryPolicy
from prelunet.evaluator.errors import ERROR_STATUSES, PreluNetError, error_status
from tests.client.client_harness import QUICK, ScriptedServicer, served
from tests.helpers.fakes import FakeSession
from tests.serving.serving_harness import png, running_server

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROWS = re.findall(r"^\| `(\w+)` \| ([A-Z_]+) \| (yes|no) \|", PAGE, re.MULTILINE)
assert len(EXAMPLES) == PAGE.count("```python") > 0
assert ROWS


@pytest.fixture(scope="module")
def address():
    with running_server(demo=FakeSession()) as server:
        yield server.address


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"example {n}" for n in range(len(EXAMPLES))])
def test_an_example_of_the_page_runs(
    example: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cat.jpg").write_bytes(png(60, 80))
    for folder in ("photos", "val/n00000001", "val/n00000004"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(3):
            (tmp_path / folder / f"{number}.png").write_bytes(png(40, 50 + number, seed=number))
    (tmp_path / "photos" / "bad.png").write_bytes(b"text")
    monkeypatch.chdir(tmp_path)
    assert "127.0.0.1:50051" in example
    exec(compile(example.replace("127.0.0.1:50051", address), "docs/client.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.search(r"class \d|demo|\[[\d.]+, [\d.]+\]", printed), printed
    if "photos" in example:
        assert re.search(r"bad.png:? .*not a readable image", printed), printed


def test_the_page_states_the_defaults_of_the_retry_policy() -> None:
    for field in fields(RetryPolicy):
        assert f"`{field.name}={field.default}`" in PAGE, field.name


def test_the_table_has_every_error_that_a_server_can_return() -> None:
    never = {"RunFolderError", "CheckpointError", "CheckFailed", "DivergenceError", "MissingExtra"}  # of other verbs
    assert {name for name, _, _ in ROWS} == {kind.__name__ for kind in ERROR_STATUSES} - never | {"PreluNetError"}


@pytest.mark.parametrize(("name", "status", "again"), ROWS)
def test_a_row_of_the_table_is_what_the_client_does(name: str, status: str, again: str) -> None:
    kind: type[PreluNetError] = getattr(errors, name)
    assert error_status(kind("x")).grpc_status == status
    server = ScriptedServicer(kind("x") if kind is not PreluNetError else grpc.StatusCode.INTERNAL)
    with served(server) as address, Client(address, retries=QUICK) as client:
        if again == "yes":
            client.classify(b"cat")
        else:
            with pytest.raises(kind):
                client.classify(b"cat")
    assert len(server.seen) == 1 + (again == "yes")
