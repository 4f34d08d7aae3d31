import pytest

from prelunet.evaluator.client import Client
from tests.client.client_harness import AsyncInThread


@pytest.fixture(params=[Client, AsyncInThread], ids=["Client", "AsyncClient"])
def client_of(request: pytest.FixtureRequest):
    """Return how to create a client, once for each of the two clients."""
    return request.param
