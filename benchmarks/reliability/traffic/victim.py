"""A client process that calls until it is killed.

    python -m benchmarks.reliability.traffic.victim HOST:PORT KIND PICTURE

KIND: classify (one call after the other), stream (an endless ClassifyStream), evaluate (an endless Evaluate). Prints
"calling" when it sends its first message.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc

PAUSE = 0.005  # seconds between two images of a stream


def main() -> None:
    """Call for ever."""
    address, kind, picture = sys.argv[1:]
    image = Path(picture).read_bytes()
    stub = pb_grpc.PreluNetServiceStub(grpc.insecure_channel(address))
    request = pb.ClassifyRequest(image=image, protocol="multi-scale")
    if kind == "classify":
        while True:
            call = stub.Classify.future(request)
            print("calling", flush=True)
            call.result()
    if kind == "stream":
        for _ in stub.ClassifyStream(
            _announced(pb.ClassifyStreamRequest(id=str(n), request=request) for n in _count())
        ):
            pass
    for _ in stub.Evaluate(_announced(_evaluation(image))):
        pass


def _count() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1
        time.sleep(PAUSE)


def _evaluation(image: bytes) -> Iterator[pb.EvaluateRequest]:
    yield pb.EvaluateRequest(start=pb.EvaluateStart(dataset="victim", protocol="multi-scale"))
    for number in _count():
        yield pb.EvaluateRequest(image=pb.LabelledImage(file=str(number), data=image, label=1))


def _announced(messages: Iterator[object]) -> Iterator[object]:
    for message in messages:
        yield message
        print("calling", flush=True)


if __name__ == "__main__":
    main()
