"""Clients of a prelunet server. They raise the same errors as local evaluation. Protocols: see `evaluator.protocols`.

with Client("127.0.0.1:50051") as client:
    answer = client.classify("cat.jpg")
    print(answer.predictions[0].name)

docs/client.md covers the rest: asyncio, many images, evaluations, deadlines and retries.
"""

from prelunet.evaluator.client.aio import AsyncClient
from prelunet.evaluator.client.calls import RetryPolicy
from prelunet.evaluator.client.messages import EvaluationProgress, ServedModel
from prelunet.evaluator.client.sync import Client
from prelunet.evaluator.rpc.credentials import Credentials

__all__ = ["AsyncClient", "Client", "Credentials", "EvaluationProgress", "RetryPolicy", "ServedModel"]
