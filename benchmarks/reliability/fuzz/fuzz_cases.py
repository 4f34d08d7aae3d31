"""Fuzzing cases: a method and the bytes of its messages, determined by a seed and a number."""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message

from benchmarks.reliability.fuzz.mutation import damage_message, damaged_bytes, damaged_picture, odd_wire
from benchmarks.reliability.traffic.pictures import hostile_pictures, made_pictures
from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb

SERVICES = ("prelunet.v1.PreluNetService", "inference.GRPCInferenceService")
PICTURES = 0.6  # share of the cases that damage a picture; the others damage a message
COMPANIONS = (0, 0, 0, 1, 3)  # number of good pictures beside a damaged one in a stream
_PROTOCOLS = (*["center"] * 12, "ten-crop", "dense-28", "dense-40", "multi-scale")  # slow ones are rarer
HOSTILE = 0.3  # share of the pictures that are the hostile ones of the tests, which take longer


@dataclass(frozen=True)
class FuzzCase:
    """One call. method: its path; messages: bytes of each message; what: the damage, for people."""

    number: int
    method: str
    messages: tuple[bytes, ...]
    what: str


@dataclass(frozen=True)
class Method:
    """A method of a service. request: class of its messages; streams: whether requests and responses are streams."""

    path: str
    request: type[Message]
    streams: tuple[bool, bool]


@cache
def methods() -> tuple[Method, ...]:
    """Return every method of both services."""
    found = []
    for service in SERVICES:
        pool = descriptor_pool.Default()  # type: ignore[no-untyped-call]
        for method in pool.FindServiceByName(service).methods:
            request = message_factory.GetMessageClass(method.input_type)
            streams = method.client_streaming, method.server_streaming
            found.append(Method(f"/{service}/{method.name}", request, streams))
    return tuple(found)


def method_at(path: str) -> Method:
    """Return the method with this path."""
    return next(method for method in methods() if method.path == path)


def case_of(seed: int, number: int) -> FuzzCase:
    """Return a case; equal seed and number give equal bytes."""
    rng = random.Random(hashlib.sha256(f"{seed} {number}".encode()).digest())
    if rng.random() >= PICTURES:
        return _message_case(rng, number)
    # A damaged picture in a valid message
    picture = rng.choice(hostile_pictures() if rng.random() < HOSTILE else made_pictures())
    damaged = damaged_picture(rng, picture.data, _blobs())
    path, make = rng.choice(_WITH_PICTURE)
    return FuzzCase(number, path, tuple(_bytes(message) for message in make(rng, damaged)), f"picture: {picture.what}")


@cache
def _blobs() -> tuple[bytes, ...]:
    """Return small pictures, for splicing and as companions."""
    return tuple(picture.data for picture in made_pictures())


def _message_case(rng: random.Random, number: int) -> FuzzCase:
    """Damage the messages of a call: their fields, their bytes, or both."""
    method = rng.choice((*methods(), *(method_at(path) for path, _ in _WITH_PICTURE)))
    messages, kinds = [], []
    for message in _good(rng, method):
        kind = rng.choice(("fields", "fields", "bytes", "wire", "random"))
        kinds.append(kind)
        if kind == "random":
            messages.append(rng.randbytes(rng.choice((0, 1, 2, 10, 100, 1000))))
        elif kind == "fields":
            damage_message(rng, message, (*rng.sample(_blobs(), 3), b"", b"\0", rng.randbytes(50)))
            messages.append(_bytes(message))
        elif kind == "wire":
            messages.append(odd_wire(rng, _bytes(message)))
        else:
            messages.append(damaged_bytes(rng, _bytes(message), (b"\x0a\x05hello", rng.randbytes(40))))
    if method.streams[0] and rng.random() < 0.2:
        rng.shuffle(messages)
    return FuzzCase(number, method.path, tuple(messages), f"message: {', '.join(kinds)}")


def _bytes(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _good(rng: random.Random, method: Method) -> list[Message]:
    """Return valid messages of a method; messages without pictures mostly get a valid model name."""
    makers = dict(_WITH_PICTURE)
    if method.path in makers:
        return list(makers[method.path](rng, rng.choice(_blobs())))
    message = method.request()
    for field in ("name", "model_name", "model"):
        if field in message.DESCRIPTOR.fields_by_name and rng.random() < 0.8:
            setattr(message, field, "demo")
    return [message]


# Valid messages with a picture that may be damaged


def _classify(rng: random.Random, image: bytes) -> Sequence[pb.ClassifyRequest]:
    request = pb.ClassifyRequest(image=image, protocol=rng.choice(_PROTOCOLS), apply_exif=rng.random() < 0.5)
    if rng.random() < 0.3:
        request.top_k = rng.randint(1, 10)
    if rng.random() < 0.005:  # takes as long as fifty other calls
        request.heatmap = True
    if rng.random() < 0.1:
        request.protocol = ""
        request.scales.extend((28, 40))
    return [request]


def _stream(rng: random.Random, image: bytes) -> list[pb.ClassifyStreamRequest]:
    images = [image, *rng.sample(_blobs(), rng.choice(COMPANIONS))]
    return [
        pb.ClassifyStreamRequest(id=str(number), request=_classify(rng, one)[0]) for number, one in enumerate(images)
    ]


def _evaluate(rng: random.Random, image: bytes) -> list[pb.EvaluateRequest]:
    start = pb.EvaluateStart(dataset="fuzz", protocol=rng.choice(_PROTOCOLS))
    images = [image, *rng.sample(_blobs(), rng.choice(COMPANIONS))]
    return [
        pb.EvaluateRequest(start=start),
        *(
            pb.EvaluateRequest(image=pb.LabelledImage(file=f"{number}.png", data=one, label=rng.randrange(10)))
            for number, one in enumerate(images)
        ),
    ]


def _infer(rng: random.Random, image: bytes) -> list[oip.ModelInferRequest]:
    images = [image, *rng.sample(_blobs(), rng.choice(COMPANIONS))]
    request = oip.ModelInferRequest(model_name="demo", id=str(rng.randrange(99)))
    tensor = request.inputs.add(name="images", datatype="BYTES", shape=[len(images)])
    if rng.random() < 0.7:
        request.raw_input_contents.append(b"".join(len(one).to_bytes(4, "little") + one for one in images))
    else:
        tensor.contents.bytes_contents.extend(images)
    request.parameters["protocol"].string_param = rng.choice(_PROTOCOLS)
    if rng.random() < 0.3:
        request.outputs.add(name="scores").parameters["classification"].int64_param = rng.randint(1, 10)
    return [request]


_WITH_PICTURE: tuple[tuple[str, Callable[[random.Random, bytes], Sequence[Any]]], ...] = (
    ("/prelunet.v1.PreluNetService/Classify", _classify),
    ("/prelunet.v1.PreluNetService/ClassifyStream", _stream),
    ("/prelunet.v1.PreluNetService/Evaluate", _evaluate),
    ("/inference.GRPCInferenceService/ModelInfer", _infer),
    (
        "/inference.GRPCInferenceService/ModelStreamInfer",
        lambda rng, image: [_infer(rng, one)[0] for one in (image, *rng.sample(_blobs(), rng.choice(COMPANIONS)))],
    ),
)
