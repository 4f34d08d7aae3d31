"""Ask a prelunet server. The same errors as with a model file at hand; `evaluator.protocols` tells what a protocol is.

with Client("127.0.0.1:50051") as client:
    answer = client.classify(Path("cat.jpg").read_bytes())
    print(answer.predictions[0].name)

docs/client.md shows the rest: asyncio, many images, evaluations, deadlines and retries.
"""

from prelunet.evaluator.client.aio import AsyncClient
from prelunet.evaluator.client.calls import RetryPolicy
from prelunet.evaluator.client.messages import EvaluationProgress, ServedModel
from prelunet.evaluator.client.sync import Client

__all__ = ["AsyncClient", "Client", "EvaluationProgress", "RetryPolicy", "ServedModel"]
