"""A seeded mix of calls as a busy server sees them: good and bad, of all shapes and methods."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
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
ODD: tuple[dict[str, Any], ...] = (  # fields that must be answered with INVALID_ARGUMENT or NOT_FOUND
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
        status, details = "OK", None
        try:
            await make(self, channel)
        except grpc.aio.AioRpcError as error:
            status, details = error.code().name, error.details()
        except asyncio.CancelledError:
            status = "CANCELLED"
        self.statuses[status] += 1
        if status not in expected:
            self.wrong.append(f"{kind}: {status}, expected {' or '.join(sorted(expected))}: {details}"[:300])

    async def cut_off(self, channel: grpc.aio.Channel, kind: str) -> None:
        """Make a call whose connection may be closed at any moment."""
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError):
            await KINDS[kind][1](self, channel)

    def drawn(self) -> tuple[bytes, str]:
        """Draw a good picture and a protocol."""
        return self.rng.choice(self.good), self.rng.choice(PROTOCOLS)

    def stream(self, channel: grpc.aio.Channel, *more: pb.ClassifyStreamRequest) -> Any:
        """Start a ClassifyStream of good requests, and then `more`."""
        requests = []
        for number in range(IN_A_STREAM):
            image, protocol = self.drawn()
            request = pb.ClassifyRequest(image=image, protocol=protocol)
            requests.append(pb.ClassifyStreamRequest(id=str(number), request=request))
        return pb_grpc.PreluNetServiceStub(channel).ClassifyStream([*requests, *more], timeout=CALL_SECONDS)


async def _heatmap(mix: Mix, channel: grpc.aio.Channel) -> None:
    answer = await classify(channel, mix.good[0], "dense-28", heatmap=True)
    if not answer.heatmap:
        mix.wrong.append("heatmap: missing from the answer")


async def _cancelled(mix: Mix, channel: grpc.aio.Channel) -> None:
    call = classify(channel, *mix.drawn())
    asyncio.get_running_loop().call_later(mix.rng.uniform(0, SOON), call.cancel)
    await call


async def _infer(mix: Mix, channel: grpc.aio.Channel) -> None:
    images = [mix.rng.choice(mix.good) for _ in range(mix.rng.randint(1, 3))]
    request = oip.ModelInferRequest(model_name=mix.model)
    request.inputs.add(name="images", datatype="BYTES", shape=[len(images)])
    request.raw_input_contents.append(b"".join(len(image).to_bytes(4, "little") + image for image in images))
    request.parameters["protocol"].string_param = mix.rng.choice(PROTOCOLS)
    await oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=CALL_SECONDS)


async def _stream(mix: Mix, channel: grpc.aio.Channel) -> None:
    answered, bad = 0, pb.ClassifyRequest(image=mix.rng.choice(mix.bad))
    async for response in mix.stream(channel, pb.ClassifyStreamRequest(id="bad", request=bad)):
        answered += 1
        if response.HasField("error") and response.id != "bad":
            mix.wrong.append(f"stream: {response.error.message}")
    if answered != IN_A_STREAM + 1:
        mix.wrong.append(f"stream: {answered} answers to {IN_A_STREAM + 1} requests")


async def _evaluate(mix: Mix, channel: grpc.aio.Channel) -> None:
    start = pb.EvaluateStart(dataset="mix", protocol=mix.rng.choice(PROTOCOLS))
    requests = [pb.EvaluateRequest(start=start)]
    for number in range(IN_A_STREAM):
        image = pb.LabelledImage(file=f"{number}.jpg", data=mix.rng.choice(mix.good), label=number)
        requests.append(pb.EvaluateRequest(image=image))
    report = None
    async for response in pb_grpc.PreluNetServiceStub(channel).Evaluate(requests, timeout=CALL_SECONDS):
        report = response.report
    if report is None or report.evaluated != IN_A_STREAM:
        mix.wrong.append("evaluate: no report of all images")


async def _left_stream(mix: Mix, channel: grpc.aio.Channel) -> None:
    """Send images and cancel without reading."""
    stream = mix.stream(channel)
    await asyncio.sleep(mix.rng.uniform(0, SOON))
    stream.cancel()


# kind → share, function that makes the call, expected statuses
KINDS: dict[str, tuple[float, Callable[[Mix, grpc.aio.Channel], Awaitable[Any]], set[str]]] = {
    "good": (50, lambda mix, channel: classify(channel, *mix.drawn()), {"OK"}),
    "heat map": (1, _heatmap, {"OK"}),
    "hostile image": (10, lambda mix, channel: classify(channel, mix.rng.choice(mix.bad)), {"OK", *BAD}),
    "odd": (8, lambda mix, channel: classify(channel, **{"image": mix.good[0], **mix.rng.choice(ODD)}), BAD),
    "impatient": (
        8,
        lambda mix, channel: classify(channel, *mix.drawn(), timeout=mix.rng.uniform(0.0005, SOON)),
        {"OK", "DEADLINE_EXCEEDED"},
    ),
    "cancelled": (8, _cancelled, {"OK", "CANCELLED"}),
    "open inference protocol": (8, _infer, {"OK"}),
    "stream": (2, _stream, {"OK"}),
    "stream that is left": (2, _left_stream, {"OK"}),
    "evaluation": (1, _evaluate, {"OK"}),
    "description": (
        2,
        lambda _, channel: pb_grpc.PreluNetServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=CALL_SECONDS),
        {"OK"},
    ),
}
