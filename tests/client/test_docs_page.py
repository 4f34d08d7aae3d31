"""docs/client.md: its list and its table of errors are what the clients do."""

import re
from pathlib import Path

import grpc
import pytest

from prelunet.evaluator import errors
from prelunet.evaluator.client import Client
from prelunet.evaluator.errors import ERROR_STATUSES, PreluNetError
from tests.client.client_harness import ScriptedServicer, served

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text().partition("## Errors")[2]
ROWS = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
RETRIED = re.findall(r"`(\w+)`", PAGE.partition("The client retries after")[2].partition(". ")[0])
assert ROWS
assert RETRIED


def test_the_table_has_every_error_that_a_server_can_return() -> None:
    never = {"RunFolderError", "CheckpointError", "CheckFailed", "CannotTell", "DivergenceError", "MissingExtra"}
    assert set(RETRIED) < set(ROWS)
    assert set(ROWS) == {kind.__name__ for kind in ERROR_STATUSES} - never | {"PreluNetError"}


@pytest.mark.parametrize("name", ROWS)
def test_the_client_retries_after_the_listed_errors_and_no_others(name: str) -> None:
    again = name in RETRIED
    kind: type[PreluNetError] = getattr(errors, name)
    server = ScriptedServicer(kind("x") if kind is not PreluNetError else grpc.StatusCode.INTERNAL)
    with served(server) as address, Client(address) as client:
        if again:
            client.classify(b"cat")
        else:
            with pytest.raises(kind):
                client.classify(b"cat")
    assert len(server.seen) == 1 + again
