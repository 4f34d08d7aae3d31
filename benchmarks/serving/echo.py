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


class Echo(pb_grpc.PreluNetServiceServicer):
    """Answers every image alike."""

    def __init__(self, answer: pb.ClassifyResponse) -> None:
        self._answer = answer

    async def Classify(self, _request: pb.ClassifyRequest, _context: Any) -> pb.ClassifyResponse:  # noqa: N802
        """Return the ready answer."""
        return self._answer


class Ready(oip_grpc.GRPCInferenceServiceServicer):
    """What `Contender.wait` and the empty calls need."""

    async def ServerLive(self, _request: Any, _context: Any) -> oip.ServerLiveResponse:  # noqa: N802
        """Answer an empty call."""
        return oip.ServerLiveResponse(live=True)

    async def ServerMetadata(self, _request: Any, _context: Any) -> oip.ServerMetadataResponse:  # noqa: N802
        """Name this server."""
        return oip.ServerMetadataResponse(name="grpc.aio", version=grpc.__version__)


async def serve(answer: pb.ClassifyResponse) -> None:
    """Serve until the process is stopped."""
    server = grpc.aio.server()
    pb_grpc.add_PreluNetServiceServicer_to_server(Echo(answer), server)
    oip_grpc.add_GRPCInferenceServiceServicer_to_server(Ready(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"serving on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(pb.ClassifyResponse.FromString(Path(sys.argv[1]).read_bytes())))
