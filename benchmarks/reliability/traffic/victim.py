"""A client process that calls until it is killed.

    python -m benchmarks.reliability.traffic.victim HOST:PORT KIND PICTURE

KIND: classify (one call after the other), stream (an endless ClassifyStream), evaluate (an endless Evaluate). Prints
"calling" when it sends its first message.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain, count
from pathlib import Path

import grpc

from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc

PAUSE = 0.005  # seconds between two messages of a stream


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
    elif kind == "stream":
        requests = (pb.ClassifyStreamRequest(id=str(number), request=request) for number in count())
        answers = stub.ClassifyStream(_announced(requests))
    else:
        start = pb.EvaluateRequest(start=pb.EvaluateStart(dataset="victim", protocol="multi-scale"))
        images = (pb.LabelledImage(file=str(number), data=image, label=1) for number in count())
        messages = (pb.EvaluateRequest(image=one) for one in images)
        answers = stub.Evaluate(_announced(chain([start], messages)))
    for _ in answers:
        pass


def _announced(messages: Iterable[object]) -> Iterator[object]:
    for message in messages:
        yield message
        print("calling", flush=True)
        time.sleep(PAUSE)


if __name__ == "__main__":
    main()
