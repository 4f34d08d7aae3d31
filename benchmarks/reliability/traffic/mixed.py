"""A seeded mix of calls as a busy server sees them: good and bad, of all shapes and methods."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np
from PIL import Image

from benchmarks.reliability.traffic.clients import CALL_SECONDS, classify
from benchmarks.reliability.traffic.pictures import encoded, good_pictures, hostile_pictures, pixels
from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.inference import inference_pb2_grpc as oip_grpc
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc

PROTOCOLS = ("center",) * 5 + ("ten-crop", "dense-28", "dense-40", "multi-scale", "center-30")
LARGER = ((240, 320), (480, 360), (90, 700))
IN_A_STREAM = 5
ROOMY = ("--queue-views", "100000")  # so that the server refuses none of these calls
SOON = 0.02  # seconds; an impatient caller waits at most this long
ODD = (  # fields that must be answered with INVALID_ARGUMENT or NOT_FOUND
    {"protocol": "dense-1"}, {"protocol": "nonsense"}, {"top_k": 0}, {"top_k": 2**31 - 1}, {"model": "nobody"},
    {"scales": [28, 28]}, {"scales": [1]}, {"image": b""}, {"image": b"no image"}, {"protocol": "dense-999999"},
)  # fmt: skip
BAD = {"INVALID_ARGUMENT", "NOT_FOUND"}


@dataclass
class Mix:
    """Makes random calls and counts them. wrong: unexpected outcomes; counts: calls by kind."""

    seed: int
    model: str
    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        larger = [encoded(pixels(*shape, self.seed), "JPEG") for shape in LARGER]
        self.good = [*(picture.data for picture in good_pictures(self.seed)), *larger]
        self.bad = [picture.data for picture in hostile_pictures()]
        gray = np.random.default_rng(self.seed).integers(0, 256, (50, 70), dtype=np.uint8)
        self.good.append(encoded(Image.fromarray(gray), "PNG"))

    async def call(self, channel: grpc.aio.Channel, kind: str | None = None) -> None:
        """Make one call; kind: None draws one."""
        kind = kind or self.rng.choices(list(KINDS), [share for share, _, _ in KINDS.values()])[0]
        _, make, expected = KINDS[kind]
        self.counts[kind] += 1
        try:
            await make(self, channel)
            status = "OK"
        except grpc.aio.AioRpcError as error:
            status = error.code().name
            if expected and status not in expected:
                self.wrong.append(f"{kind}: {status}: {error.details()}"[:300])
        except asyncio.CancelledError:
            status = "CANCELLED"
        self.statuses[status] += 1
        if status == "OK" and "OK" not in expected:
            self.wrong.append(f"{kind}: answered, but an error was expected")

    async def cut_off(self, channel: grpc.aio.Channel, kind: str) -> None:
        """Make a call whose connection may be closed at any moment."""
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError):
            await KINDS[kind][1](self, channel)

    def image(self) -> bytes:
        """Draw a good picture."""
        return self.rng.choice(self.good)

    def protocol(self) -> str:
        """Draw a protocol."""
        return self.rng.choice(PROTOCOLS)

    def request(self) -> pb.ClassifyRequest:
        """Draw a good request."""
        return pb.ClassifyRequest(image=self.image(), protocol=self.protocol())


async def _good(mix: Mix, channel: grpc.aio.Channel) -> None:
    await classify(channel, mix.image(), mix.protocol())


async def _heatmap(mix: Mix, channel: grpc.aio.Channel) -> None:
    answer = await classify(channel, mix.good[0], "dense-28", heatmap=True)
    if not answer.heatmap:
        mix.wrong.append("heatmap: missing from the answer")


async def _bad_image(mix: Mix, channel: grpc.aio.Channel) -> None:
    await classify(channel, mix.rng.choice(mix.bad), "center")


async def _odd(mix: Mix, channel: grpc.aio.Channel) -> None:
    fields: dict[str, Any] = {"image": mix.good[0], **mix.rng.choice(ODD)}
    await classify(channel, **fields)


async def _impatient(mix: Mix, channel: grpc.aio.Channel) -> None:
    await classify(channel, mix.image(), mix.protocol(), timeout=mix.rng.uniform(0.0005, SOON))


async def _cancelled(mix: Mix, channel: grpc.aio.Channel) -> None:
    call = classify(channel, mix.image(), mix.protocol())
    asyncio.get_running_loop().call_later(mix.rng.uniform(0, SOON), call.cancel)
    await call


async def _infer(mix: Mix, channel: grpc.aio.Channel) -> None:
    images = [mix.image() for _ in range(mix.rng.randint(1, 3))]
    request = oip.ModelInferRequest(model_name=mix.model)
    request.inputs.add(name="images", datatype="BYTES", shape=[len(images)])
    request.raw_input_contents.append(b"".join(len(image).to_bytes(4, "little") + image for image in images))
    request.parameters["protocol"].string_param = mix.protocol()
    await oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=CALL_SECONDS)


async def _stream(mix: Mix, channel: grpc.aio.Channel) -> None:
    requests = [pb.ClassifyStreamRequest(id=str(number), request=mix.request()) for number in range(IN_A_STREAM)]
    requests.append(pb.ClassifyStreamRequest(id="bad", request=pb.ClassifyRequest(image=mix.rng.choice(mix.bad))))
    answered = 0
    async for response in pb_grpc.PreluNetServiceStub(channel).ClassifyStream(_each(requests), timeout=CALL_SECONDS):
        answered += 1
        if response.HasField("error") and response.id != "bad":
            mix.wrong.append(f"stream: {response.error.message}")
    if answered != len(requests):
        mix.wrong.append(f"stream: {answered} answers to {len(requests)} requests")


async def _evaluate(mix: Mix, channel: grpc.aio.Channel) -> None:
    start = pb.EvaluateRequest(start=pb.EvaluateStart(dataset="mix", protocol=mix.protocol()))
    images = [
        pb.EvaluateRequest(image=pb.LabelledImage(file=f"{number}.jpg", data=mix.image(), label=number))
        for number in range(IN_A_STREAM)
    ]
    report = None
    async for response in pb_grpc.PreluNetServiceStub(channel).Evaluate(_each([start, *images]), timeout=CALL_SECONDS):
        report = response.report
    if report is None or report.evaluated != IN_A_STREAM:
        mix.wrong.append("evaluate: no report of all images")


async def _left_stream(mix: Mix, channel: grpc.aio.Channel) -> None:
    """Send images and cancel without reading."""
    requests = [pb.ClassifyStreamRequest(id=str(number), request=mix.request()) for number in range(IN_A_STREAM)]
    stream = pb_grpc.PreluNetServiceStub(channel).ClassifyStream(_each(requests), timeout=CALL_SECONDS)
    await asyncio.sleep(mix.rng.uniform(0, SOON))
    stream.cancel()


async def _described(_mix: Mix, channel: grpc.aio.Channel) -> None:
    await pb_grpc.PreluNetServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=CALL_SECONDS)


async def _each(messages: list[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


# kind → share, function that makes the call, expected statuses
KINDS: dict[str, tuple[float, Callable[[Mix, grpc.aio.Channel], Coroutine[Any, Any, None]], set[str]]] = {
    "good": (50, _good, {"OK"}),
    "heat map": (1, _heatmap, {"OK"}),
    "hostile image": (10, _bad_image, {"OK", *BAD}),
    "odd": (8, _odd, BAD),
    "impatient": (8, _impatient, {"OK", "DEADLINE_EXCEEDED"}),
    "cancelled": (8, _cancelled, {"OK", "CANCELLED"}),
    "open inference protocol": (8, _infer, {"OK"}),
    "stream": (2, _stream, {"OK"}),
    "stream that is left": (2, _left_stream, {"OK"}),
    "evaluation": (1, _evaluate, {"OK"}),
    "description": (2, _described, {"OK"}),
}
