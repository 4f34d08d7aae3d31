"""The clients of one process: a fixed number of calls in flight, with latencies.

    python -m benchmarks.serving.load FOLDER      folder of pictures; then one question per line, see `Workload`

Uses plain generated stubs, and streams of bytes for HTTP, in one event loop, like a program with many calls. Each
client has its own connection and calls again after its answer.
"""

import asyncio
import json
import ssl
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from benchmarks.serving.worker import answer_questions
from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.inference import inference_pb2_grpc as oip_grpc
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc

TOP = 5
CALL_SECONDS = 120.0  # deadline of every call
CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),  # otherwise all clients of a process would share a connection
    ("grpc.max_receive_message_length", -1),
)

Best = list[tuple[int, float]]  # class index and score, best first
Json = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """The calls of one process.

    api: a key of UNARY, or HTTP; model, protocol: of the requests (peers have one protocol per model);
    clients, calls: of this process; first: index of its first picture; begin_at: on the clock of time.monotonic();
    tls_ca: file of the authorities of the server's certificate, None without TLS; one_connection: of all its clients;
    rate: of calls at random moments, in calls/s of this process, instead of those of clients that wait for answers.
    """

    address: str
    api: str
    model: str
    protocol: str
    clients: int
    calls: int
    first: int
    begin_at: float
    tls_ca: str | None = None
    one_connection: bool = False
    rate: float = 0.0


def classify_request(load: Workload, image: bytes) -> pb.ClassifyRequest:
    """Return the request of Classify for a picture."""
    return pb.ClassifyRequest(image=image, model=load.model, protocol=load.protocol, top_k=TOP)


def oip_request(load: Workload, image: bytes) -> oip.ModelInferRequest:
    """Return the request of the Open Inference Protocol for a picture; a peer has one protocol per model."""
    of_peer = load.api == "OIP of a peer"
    request = oip.ModelInferRequest(model_name=load.model)
    request.inputs.add(name="images", datatype="BYTES", shape=[1, 1] if of_peer else [1])
    request.raw_input_contents.append(struct.pack("<I", len(image)) + image)
    if not of_peer:
        request.parameters["protocol"].string_param = load.protocol
        request.outputs.add(name="scores").parameters["classification"].int64_param = TOP
    return request


def best_of_prediction(response: pb.ClassifyResponse) -> Best:
    """Return the best classes of a response of Classify."""
    return [(one.class_index, one.score) for one in response.predictions]


def best_of_ours(response: oip.ModelInferResponse) -> Best:
    """Return the best classes of our server's response: length-prefixed strings such as 0.826453:504:coffee mug."""
    data, found = response.raw_output_contents[0], []
    while data:
        (length,) = struct.unpack_from("<I", data)
        score, index, _ = data[4 : 4 + length].decode().split(":", 2)
        found.append((int(index), float(score)))
        data = data[4 + length :]
    return found


def best_of_peer(response: oip.ModelInferResponse) -> Best:
    """Return the best classes of a peer's response."""
    raw = {tensor.name: data for tensor, data in zip(response.outputs, response.raw_output_contents, strict=True)}
    indices, scores = (np.frombuffer(raw[name], kind) for name, kind in (("class_index", "<i4"), ("score", "<f4")))
    return [(int(index), float(score)) for index, score in zip(indices, scores, strict=True)]


# API of one image per call → stub and method, function that builds the request, function that reads the response.
UNARY: dict[str, tuple[Any, str, Callable[[Workload, bytes], Any], Callable[[Any], Best]]] = {
    "Classify": (pb_grpc.PreluNetServiceStub, "Classify", classify_request, best_of_prediction),
    "OIP": (oip_grpc.GRPCInferenceServiceStub, "ModelInfer", oip_request, best_of_ours),
    "OIP of a peer": (oip_grpc.GRPCInferenceServiceStub, "ModelInfer", oip_request, best_of_peer),
}


def open_channel(channels: Any, address: str, tls_ca: str | Path | None, options: Any = ()) -> Any:
    """Return a channel of `channels`: the module grpc or grpc.aio. tls_ca: as in Workload."""
    if tls_ca is None:
        return channels.insecure_channel(address, options)
    return channels.secure_channel(address, grpc.ssl_channel_credentials(Path(tls_ca).read_bytes()), options)


@cache
def _tls_context(tls_ca: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=tls_ca)


class Unary:
    """Calls of one image each, over one connection."""

    def __init__(self, load: Workload, images: Sequence[bytes]) -> None:
        stub, method, request, self._best = UNARY[load.api]
        self._channel = open_channel(grpc.aio, load.address, load.tls_ca, CHANNEL)
        self._requests = [request(load, image) for image in images]
        self._method = getattr(stub(self._channel), method)

    async def connect(self) -> None:
        """Connect, also over TLS."""
        await self._channel.channel_ready()

    async def __call__(self, index: int) -> Best:
        """Classify a picture and return its best classes."""
        return self._best(await self._method(self._requests[index % len(self._requests)], timeout=CALL_SECONDS))

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


class Http:
    """Calls of `POST /v1/classify`, one image each, over one connection that stays open. token: sent if not empty."""

    token = ""

    def __init__(self, load: Workload, images: Sequence[bytes]) -> None:
        self._address = load.address.rsplit(":", 1)
        self._tls = _tls_context(load.tls_ca) if load.tls_ca is not None else None
        line = f"POST /v1/classify?model={load.model}&protocol={load.protocol}&top_k={TOP} HTTP/1.1"
        self._head, self._images = f"{line}\r\nHost: {load.address}", images

    async def connect(self) -> None:
        """Connect, also over TLS."""
        self._received, self._sent = await asyncio.open_connection(*self._address, ssl=self._tls)

    async def __call__(self, index: int) -> Best:
        """Classify a picture and return its best classes."""
        received, sent = self._received, self._sent
        image = self._images[index % len(self._images)]
        token = f"\r\nAuthorization: Bearer {self.token}" if self.token else ""
        sent.write(f"{self._head}{token}\r\nContent-Length: {len(image)}\r\n\r\n".encode() + image)
        head = await received.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(None, 1)[0])
        body = await received.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(body.decode())
        return [(one["class_index"], one["score"]) for one in json.loads(body)["predictions"]]

    async def close(self) -> None:
        """Close the connection."""
        self._sent.close()


async def connected(load: Workload, images: Sequence[bytes]) -> Unary | Http:
    """Connect to the server; call the result with the index of a picture."""
    connection = Http(load, images) if load.api == "HTTP" else Unary(load, images)
    async with asyncio.timeout(CALL_SECONDS):
        await connection.connect()
    return connection


async def run(load: Workload, images: Sequence[bytes]) -> Json:
    """Make the calls of a workload; failed calls are counted, and their clients continue.

    Returns latencies in seconds, in order of completion, begin and end on the clock of time.monotonic(), and the
    errors. The calls begin late if connecting takes until after `begin_at`.
    """
    connections = [await connected(load, images) for _ in range(1 if load.one_connection else load.clients)]
    connections *= load.clients // len(connections)
    latencies: list[float] = []
    errors: list[str] = []
    begun = ended = max(load.begin_at, time.monotonic())
    numbers = iter(range(load.first, load.first + load.calls))  # shared by all clients of the process

    async def call(connection: Unary | Http, number: int, since: float) -> None:
        nonlocal ended
        try:
            await connection(number)
        except (grpc.RpcError, RuntimeError, OSError, EOFError) as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else None
            errors.append(details or str(error))
        ended = time.monotonic()
        latencies.append(ended - since)

    async def client(connection: Unary | Http) -> None:
        for number in numbers:
            await call(connection, number, time.monotonic())

    async def arrivals() -> None:
        moments = begun + np.cumsum(np.random.default_rng(load.first).exponential(1 / load.rate, load.calls))
        async with asyncio.TaskGroup() as group:
            for number, moment in zip(numbers, moments.tolist(), strict=True):
                await asyncio.sleep(max(0.0, moment - time.monotonic()))
                group.create_task(call(connections[number % len(connections)], number, moment))

    try:
        await asyncio.sleep(max(0.0, begun - time.monotonic()))
        await (arrivals() if load.rate else asyncio.gather(*map(client, connections)))
    finally:
        for connection in set(connections):
            await connection.close()
    return {"latencies": latencies, "begun": begun, "ended": ended, "errors": errors}


async def best_of_all(load: Workload, images: Sequence[bytes]) -> list[Best]:
    """Classify each picture once, all at the same time, each over a connection of its own."""
    connections = [await connected(load, images) for _ in images]
    try:
        return await asyncio.gather(*(connection(index) for index, connection in enumerate(connections)))
    finally:
        for connection in connections:
            await connection.close()


def main() -> None:
    """Answer questions: {"load": ...}, {"best": ...}."""
    images = [file.read_bytes() for file in sorted(Path(sys.argv[1]).iterdir())]

    def answer(question: Json) -> Json:
        chosen = [images[index] for index in question["images"]]
        if "best" in question:
            return {"best": asyncio.run(best_of_all(Workload(**question["best"]), chosen))}
        begun = time.process_time()
        calls = asyncio.run(run(Workload(**question["load"]), chosen))
        return {**calls, "cpu_seconds": time.process_time() - begun}

    answer_questions(answer)


if __name__ == "__main__":
    main()
