"""Clients of a prelunet server. They raise the same errors as local evaluation. Protocols: see `evaluator.protocols`.

with Client("127.0.0.1:50051") as client:
    answer = client.classify("cat.jpg")
    print(answer.predictions[0].name)

docs/client.md covers the rest: asyncio, many images, evaluations, deadlines and retries.
"""

from ..rpc.credentials import Credentials
from .aio import AsyncClient
from .messages import EvaluationProgress, ServedModel
from .sync import Client

__all__ = ["AsyncClient", "Client", "Credentials", "EvaluationProgress", "ServedModel"]
