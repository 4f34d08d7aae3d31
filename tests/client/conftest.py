from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from prelunet.evaluator.client import Client
from tests.client.client_harness import AsyncInThread, ScriptedServicer, served


@pytest.fixture(params=[Client, AsyncInThread], ids=["Client", "AsyncClient"])
def client_of(request: pytest.FixtureRequest):
    """Return how to create a client of an address, once for each of the two clients."""
    return request.param


@pytest.fixture
def client_to(client_of):
    """Return how to serve a servicer and create a client of it; options: of the client."""

    @contextmanager
    def connected(servicer: ScriptedServicer, **options: Any) -> Iterator[Any]:
        with served(servicer) as address, client_of(address, **options) as client:
            yield client

    return connected
