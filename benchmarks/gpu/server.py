"""Part `server`: images per second and latency of one `prelunet serve`, called by 16 and by 64 clients on loopback.

Clients and server share the cores of the machine, and every call carries a JPEG of ImageNet's sizes.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common.imagenet_sizes import draw
from benchmarks.common.rig import Rig
from benchmarks.common.runner import Case
from benchmarks.gpu.throughput import jpeg

PROCESSES = 4  # that the clients are spread over
PICTURES = 256
WARM = 256  # calls before each measurement: the canvases are new
LOADS = (
    ("multi-scale", 16, 768, 100),
    ("multi-scale", 64, 768, 30),
    ("center", 16, 2048, 25),
    ("center", 64, 2048, 25),
)
PLAN = (f"A, fp16: {', '.join(f'{protocol} with {clients} clients' for protocol, clients, *_ in LOADS)}; 100 s",)


def cases(rig: Rig) -> Iterator[Case]:
    """Yield the cases: the first starts the server, which runs until the last is done."""
    with ExitStack() as stack:
        start = cache(partial(_start, rig, stack))
        for protocol, clients, calls, seconds in LOADS:
            settings = {"what": "server", "net": "A", "precision": "fp16", "protocol": protocol, "clients": clients}
            yield Case(settings, partial(_measure, rig, start, protocol, clients, calls), seconds)


def _start(rig: Rig, stack: ExitStack) -> tuple[Any, Any]:
    """Return a server and processes that call it; raises ImportError where the project is not installed."""
    from benchmarks.common.server_process import PreluNetServer
    from benchmarks.serving.worker import Worker

    version("prelunet")  # which the server states
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    pictures = folder / "pictures"
    pictures.mkdir()
    for index, size in enumerate(draw(rig.reduced(PICTURES))):
        (pictures / f"{index:04}.jpg").write_bytes(jpeg(size, index))
    model = rig.model_file("A", "fp16")
    workers = [Worker("benchmarks.serving.load", str(pictures)) for _ in range(rig.reduced(PROCESSES))]
    for worker in workers:
        stack.callback(worker.close)
    options = ("--device", rig.device, "--metrics-port", "0")
    return stack.enter_context(PreluNetServer({"a": model}, *options, log=folder / "log")), workers


def _measure(rig: Rig, start: Any, protocol: str, clients: int, calls: int) -> dict[str, Any]:
    try:
        from benchmarks.serving.bench import LoadTarget, summary
        from benchmarks.serving.peers import Contender

        process, workers = start()
    except ImportError as error:  # the project and its requirements are not installed
        return {"not_available": str(error)}
    server = Contender("prelunet", process, {})
    server.wait(["a"])
    load = LoadTarget(server, "Classify", "a", protocol, tuple(range(rig.reduced(PICTURES))), clients)
    load.run_turn(workers, rig.reduced(WARM, clients), 0)
    before = process.metrics()
    turn = load.run_turn(workers, rig.reduced(calls, clients), 1)
    after = process.metrics()
    batches, changes, canvas, views = (
        after(name) - before(name)
        for name in ("batch_views_count", "canvas_changes_total", "canvas_pixels_total", "view_pixels_total")
    )
    memory = rig.used_memory_gb()
    return {
        **summary([turn]),
        "images_per_second": (turn.calls - len(turn.errors)) / turn.seconds,
        "views_per_batch": (after("batch_views_sum") - before("batch_views_sum")) / batches,
        "padding": 1 - views / canvas,
        "changes_of_shape": int(changes),
        "ready_seconds": process.ready_after,
        "memory_gb": memory,
        "main_memory_gb": process.rss_mb() / 1024,
        "promised_gb": process.promised_mb / 1024,
    }
