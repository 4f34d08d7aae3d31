"""Part `server`: images per second and latency of `prelunet serve` with 16 clients on loopback.

Clients and server share the cores of the machine, and every call carries a JPEG of ImageNet's sizes.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common.imagenet_sizes import draw
from benchmarks.common.rig import Rig
from benchmarks.common.runner import Case
from benchmarks.gpu.throughput import jpeg

CLIENTS, PROCESSES = 16, 4
PICTURES, CALLS = 256, 1024
WARM = 256  # calls before: the canvases are new
PROTOCOLS = {"multi-scale": 60, "center": 25}  # and the estimated seconds
PLAN = (f"A, fp16, {' and '.join(PROTOCOLS)}: {CALLS} calls of {CLIENTS} clients; about 1 minute",)


def cases(rig: Rig) -> Iterator[Case]:
    """Yield the cases."""
    for protocol, seconds in PROTOCOLS.items():
        settings = {"what": "server", "net": "A", "precision": "fp16", "protocol": protocol, "clients": CLIENTS}
        yield Case(settings, partial(_measure, rig, settings), seconds)


def _measure(rig: Rig, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        from benchmarks.common.server_process import PreluNetServer
        from benchmarks.serving.bench import LoadTarget, summary
        from benchmarks.serving.peers import Contender
        from benchmarks.serving.worker import Worker

        version("prelunet")  # which the server states
    except ImportError as error:  # the project and its requirements are not installed
        return {"not_available": str(error)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pictures = folder / "pictures"
        pictures.mkdir()
        for index, size in enumerate(draw(rig.reduced(PICTURES))):
            (pictures / f"{index:04}.jpg").write_bytes(jpeg(size, index))
        model = rig.model_file(settings["net"], settings["precision"])
        workers = [Worker("benchmarks.serving.load", str(pictures)) for _ in range(rig.reduced(PROCESSES))]
        try:
            with PreluNetServer({"a": model}, "--device", rig.device, log=folder / "log") as process:
                server = Contender("prelunet", process, {})
                server.wait(["a"])
                images = tuple(range(rig.reduced(PICTURES)))
                load = LoadTarget((server,), "Classify", "a", settings["protocol"], images, CLIENTS)
                load.run_turn(workers, rig.reduced(WARM, CLIENTS), 0)
                turn = load.run_turn(workers, rig.reduced(CALLS, CLIENTS), 1)
        finally:
            for worker in workers:
                worker.close()
    return {**summary([turn]), "images_per_second": (turn.calls - len(turn.errors)) / turn.seconds}
