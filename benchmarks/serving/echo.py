"""A bare grpc.aio server: parses the messages of Classify and answers each with the same ready message.

    python -m benchmarks.serving.echo ANSWER      file with a serialized ClassifyResponse

What it takes of the CPU is gRPC's and protobuf's own cost of our calls; run.py compares our server with it.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.inference import inference_pb2_grpc as oip_grpc
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc


class Echo(pb_grpc.PreluNetServiceServicer, oip_grpc.GRPCInferenceServiceServicer):
    """Answers every image alike, and a question about its version."""

    def __init__(self, answer: pb.ClassifyResponse) -> None:
        self._answer = answer

    async def Classify(self, _request: pb.ClassifyRequest, _context: Any) -> pb.ClassifyResponse:  # noqa: N802
        """Return the ready answer."""
        return self._answer

    async def ServerMetadata(self, _request: Any, _context: Any) -> oip.ServerMetadataResponse:  # noqa: N802
        """Name this server."""
        return oip.ServerMetadataResponse(name="grpc.aio", version=grpc.__version__)


async def serve(answer: pb.ClassifyResponse) -> None:
    """Serve until the process is stopped."""
    server, echo = grpc.aio.server(), Echo(answer)
    pb_grpc.add_PreluNetServiceServicer_to_server(echo, server)
    oip_grpc.add_GRPCInferenceServiceServicer_to_server(echo, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"serving on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(pb.ClassifyResponse.FromString(Path(sys.argv[1]).read_bytes())))
