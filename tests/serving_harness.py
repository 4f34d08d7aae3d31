"""A server in a thread of the test's process, on a free port, for the tests of serving and of the client."""

import asyncio
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from evaluator.imaging.decode import DecodeLimits
from evaluator.serving.classifier import MAX_WAITING
from evaluator.serving.models import ModelFile, Models
from evaluator.serving.server import Server


@dataclass(frozen=True)
class Running:
    """A server that answers. address: host:port; models: what it serves; loop_thread: on which its event loop runs."""

    address: str
    models: Models
    loop_thread: int


@contextmanager
def running_server(
    limits: DecodeLimits | None = None, max_waiting: int = MAX_WAITING, **sessions: Any
) -> Iterator[Running]:
    """Serve sessions (real or fake) under their keywords; the files are called NAME.onnx in a folder /secret."""
    ready = threading.Event()
    state: dict[str, Any] = {}

    async def live() -> None:
        server = Server("127.0.0.1", 0)
        loaded = [(ModelFile(name, Path(f"/secret/{name}.onnx")), session) for name, session in sessions.items()]
        state["models"] = Models(loaded, limits or DecodeLimits(), max_waiting)
        await server.start(state["models"])
        state.update(address=server.address, stop=asyncio.Event(), loop=asyncio.get_running_loop())
        ready.set()
        await state["stop"].wait()
        await server.stop(grace=5)

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    assert ready.wait(30), "the server did not start"
    try:
        assert thread.ident is not None
        yield Running(state["address"], state["models"], thread.ident)
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join()


def png(height: int, width: int, seed: int = 0) -> bytes:
    """Return an encoded image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
