"""The clients of one process: a fixed number of calls in flight, or calls at random moments, with latencies.

    python -m benchmarks.serving.load FOLDER      folder of pictures; then one question per line, see `Workload`

Uses plain generated stubs in one event loop, like a program with many calls. Each client has its own connection and
calls again after its answer; over `ClassifyStream` all clients of the process share one stream.
"""

import asyncio
import random
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    api: one of APIS; model, protocol: of the requests (peers have one protocol per model); clients: of this process;
    calls: of this process; first: index of its first picture; begin_at: on the clock of time.monotonic();
    rate: calls per second at random moments (Poisson) of this process, None for closed-loop clients.
    """

    address: str
    api: str
    model: str
    protocol: str
    clients: int
    calls: int
    first: int
    begin_at: float
    rate: float | None = None
    seed: int = 0


@dataclass
class CallResults:
    """Results of the calls. Times are those of time.monotonic(); latencies in seconds, in order of completion."""

    latencies: list[float]
    ended: float
    errors: list[str]


class Unary:
    """Calls of one image each, over one connection."""

    def __init__(self, load: Workload, images: Sequence[bytes]) -> None:
        self._channel = grpc.aio.insecure_channel(load.address, options=CHANNEL)
        self._requests = [self.request(load, image) for image in images]
        self._method = self.method(self._channel)

    async def __call__(self, index: int) -> Best:
        """Classify a picture and return its best classes."""
        return self.best(await self._method(self._requests[index % len(self._requests)], timeout=CALL_SECONDS))

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    def request(self, load: Workload, image: bytes) -> Any:
        """Return the request for a picture."""
        return pb.ClassifyRequest(image=image, model=load.model, protocol=load.protocol, top_k=TOP)

    def method(self, channel: grpc.aio.Channel) -> Any:
        """Return the callable that sends requests."""
        return pb_grpc.PreluNetServiceStub(channel).Classify

    def best(self, response: Any) -> Best:
        """Return the best classes of a response."""
        return [(one.class_index, one.score) for one in response.predictions]


class Oip(Unary):
    """The Open Inference Protocol of our server."""

    def request(self, load: Workload, image: bytes) -> Any:
        """Return the request for a picture."""
        request = _infer_request(load, image, [1])
        request.parameters["protocol"].string_param = load.protocol
        request.outputs.add(name="scores").parameters["classification"].int64_param = TOP
        return request

    def method(self, channel: grpc.aio.Channel) -> Any:
        """Return the callable that sends requests."""
        return oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer

    def best(self, response: Any) -> Best:
        """Return the best classes of a response: length-prefixed strings such as 0.826453:504:coffee mug."""
        data, found = response.raw_output_contents[0], []
        while data:
            (length,) = struct.unpack_from("<I", data)
            score, index, _ = data[4 : 4 + length].decode().split(":", 2)
            found.append((int(index), float(score)))
            data = data[4 + length :]
        return found


class OipOfPeer(Oip):
    """The Open Inference Protocol of the peers' models."""

    def request(self, load: Workload, image: bytes) -> Any:
        """Return the request for a picture."""
        return _infer_request(load, image, [1, 1])

    def best(self, response: Any) -> Best:
        """Return the best classes of a response."""
        contents = response.raw_output_contents
        raw = {tensor.name: data for tensor, data in zip(response.outputs, contents, strict=True)}
        indices, scores = (np.frombuffer(raw[name], kind) for name, kind in (("class_index", "<i4"), ("score", "<f4")))
        return [(int(index), float(score)) for index, score in zip(indices, scores, strict=True)]


class Live(Unary):
    """ServerLive of the Open Inference Protocol: an empty call."""

    def request(self, load: Workload, image: bytes) -> Any:  # noqa: ARG002
        """Return an empty request."""
        return oip.ServerLiveRequest()

    def method(self, channel: grpc.aio.Channel) -> Any:
        """Return the callable that sends requests."""
        return oip_grpc.GRPCInferenceServiceStub(channel).ServerLive

    def best(self, response: Any) -> Best:  # noqa: ARG002
        """Return nothing."""
        return []


def _infer_request(load: Workload, image: bytes, shape: Sequence[int]) -> Any:
    request = oip.ModelInferRequest(model_name=load.model)
    request.inputs.add(name="images", datatype="BYTES", shape=shape)
    request.raw_input_contents.append(struct.pack("<I", len(image)) + image)
    return request


class Stream:
    """One ClassifyStream on one connection; answers come in any order."""

    def __init__(self, load: Workload, images: Sequence[bytes]) -> None:
        self._channel = grpc.aio.insecure_channel(load.address, options=CHANNEL)
        self._requests = [
            pb.ClassifyRequest(image=image, model=load.model, protocol=load.protocol, top_k=TOP) for image in images
        ]
        self._call = pb_grpc.PreluNetServiceStub(self._channel).ClassifyStream(timeout=CALL_SECONDS)
        self._pending: dict[str, asyncio.Future[Best]] = {}
        self._sent = 0
        self._turn = asyncio.Lock()  # one message at a time
        self._reading = asyncio.create_task(self._read())

    async def __call__(self, index: int) -> Best:
        """Classify a picture and return its best classes."""
        self._sent += 1
        name = str(self._sent)
        answer: asyncio.Future[Best] = asyncio.get_running_loop().create_future()
        self._pending[name] = answer
        request = pb.ClassifyStreamRequest(id=name, request=self._requests[index % len(self._requests)])
        async with self._turn:
            await self._call.write(request)
        return await answer

    async def _read(self) -> None:
        try:
            async for response in self._call:
                answer = self._pending.pop(response.id)
                if response.HasField("error"):
                    answer.set_exception(RuntimeError(response.error.message))
                else:
                    answer.set_result([(one.class_index, one.score) for one in response.response.predictions])
        except grpc.RpcError as error:
            for answer in self._pending.values():
                answer.set_exception(error)

    async def close(self) -> None:
        """Close the stream and the connection."""
        await self._call.done_writing()
        await self._reading
        await self._channel.close()


APIS: dict[str, Callable[[Workload, Sequence[bytes]], Any]] = {
    "Classify": Unary,
    "ClassifyStream": Stream,
    "OIP": Oip,
    "OIP of a peer": OipOfPeer,
    "ServerLive": Live,
}


async def run(load: Workload, images: Sequence[bytes]) -> CallResults:
    """Make the calls of a workload; failed calls are counted, and their clients continue."""
    opened = [APIS[load.api](load, images) for _ in range(1 if load.api == "ClassifyStream" else load.clients)]
    calls = CallResults([], load.begin_at, [])
    try:
        await _sleep_until(load.begin_at)
        if load.rate is None:
            numbers = iter(range(load.calls))
            await asyncio.gather(
                *(
                    _closed_loop_client(load, opened[client % len(opened)], numbers, calls)
                    for client in range(load.clients)
                )
            )
        else:
            await _open_loop(load, opened, calls)
    finally:
        for one in opened:
            await one.close()
    return calls


async def _closed_loop_client(load: Workload, ask: Any, numbers: Any, calls: CallResults) -> None:
    """Run one closed-loop client; all clients of a process share the iterator of call numbers."""
    for number in numbers:
        await _ask(ask, load.first + number, time.monotonic(), calls)


async def _open_loop(load: Workload, opened: Sequence[Any], calls: CallResults) -> None:
    """Make calls at random moments regardless of answers; latencies count from the due time."""
    assert load.rate is not None
    chance, due = random.Random(load.seed), load.begin_at
    async with asyncio.TaskGroup() as group:
        for number in range(load.calls):
            due += chance.expovariate(load.rate)
            await _sleep_until(due)
            group.create_task(_ask(opened[number % len(opened)], load.first + number, due, calls))


async def _ask(ask: Any, index: int, since: float, calls: CallResults) -> None:
    try:
        await ask(index)
    except (grpc.RpcError, RuntimeError) as error:
        details = error.details() if isinstance(error, grpc.aio.AioRpcError) else None
        calls.errors.append(details or str(error))
    calls.ended = time.monotonic()
    calls.latencies.append(calls.ended - since)


async def _sleep_until(moment: float) -> None:
    if (seconds := moment - time.monotonic()) > 0:
        await asyncio.sleep(seconds)


async def best_of_all(load: Workload, images: Sequence[bytes]) -> list[Best]:
    """Classify each picture once, one after the other."""
    ask = APIS[load.api](load, images)
    try:
        return [await ask(index) for index in range(len(images))]
    finally:
        await ask.close()


def main() -> None:
    """Answer questions: {"load": ...}, {"best": ...}."""
    images = [file.read_bytes() for file in sorted(Path(sys.argv[1]).iterdir())]

    def answer(question: Json) -> Json:
        chosen = [images[index] for index in question["images"]]
        if "best" in question:
            return {"best": asyncio.run(best_of_all(Workload(**question["best"]), chosen))}
        begun = time.process_time()
        calls = asyncio.run(run(Workload(**question["load"]), chosen))
        return {**vars(calls), "cpu_seconds": time.process_time() - begun}

    answer_questions(answer)


if __name__ == "__main__":
    main()
