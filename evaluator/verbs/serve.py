"""The verb `prelunet serve`."""

import asyncio
import logging
from typing import Annotated

import typer

from evaluator.engine.session import Placement
from evaluator.imaging.decode import DecodeLimits
from evaluator.serving.classifier import MAX_WAITING
from evaluator.serving.models import parse_models
from evaluator.serving.server import ServeOptions
from evaluator.serving.server import serve as serve_until_stopped
from evaluator.terminal import say
from evaluator.verbs.options import DeviceOption, PrecisionOption, ThreadsOption


def serve(
    model: Annotated[
        list[str], typer.Option(metavar="NAME=MODEL.onnx", help="A model and the name it is served under; repeatable.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 50051,
    device: DeviceOption = "auto",
    precision: PrecisionOption = None,
    threads: ThreadsOption = 0,
    max_waiting: Annotated[int, typer.Option(min=1, help="Images that may wait for one model; more are refused.")] = (
        MAX_WAITING
    ),
    max_image_bytes: Annotated[int, typer.Option(min=1, help="Largest encoded image.")] = DecodeLimits.max_bytes,
    max_image_pixels: Annotated[int, typer.Option(min=1, help="Largest decoded image.")] = DecodeLimits.max_pixels,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that calls in flight have after SIGTERM.")] = 30.0,
) -> None:
    """Serve models over gRPC until SIGTERM or Ctrl-C.

    The first line of output says the address, the models and what runs them; calls are answered from then on.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    limits = DecodeLimits(max_image_bytes, max_image_pixels)
    placement = Placement(device, precision, threads)
    options = ServeOptions(parse_models(model), host, port, placement, grace, limits, max_waiting)
    unfinished = asyncio.run(serve_until_stopped(options, say))
    say(f"stopped; calls cut off after {grace:g} s: {unfinished}" if unfinished else "stopped; no call was lost")
