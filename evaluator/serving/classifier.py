"""One served model: encoded bytes in, an answer out, with no arithmetic on the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from evaluator.engine.classify import Classified, combine, views_of
from evaluator.engine.overlay import draw_heat_maps, png_bytes
from evaluator.engine.session import Session
from evaluator.imaging.decode import DecodeLimits, decode_rgb
from evaluator.imaging.views import ViewImage
from evaluator.protocols import Protocol
from evaluator.serving.compute import ComputeThread

Answer = TypeVar("Answer")


class Classifier:
    """A session behind its compute thread, and the threads that decode for it.

    name: under which it is served; file: last part of the model file's path;
    decoders: threads shared by all models; limits: what an image may be.
    """

    def __init__(self, name: str, file: str, session: Session, decoders: ThreadPoolExecutor, limits: DecodeLimits):
        self.name = name
        self.file = file
        self.session = session
        self._decoders = decoders
        self._limits = limits
        self._compute = ComputeThread(session, name)

    async def classify(
        self, image: bytes, protocol: Protocol, answer: Callable[[Classified], Answer], *, keep_windows: bool = False
    ) -> Answer:
        """Classify one encoded image; `answer` makes of the result what the caller needs, in a thread.

        keep_windows: with the window scores that `heat_maps` needs.
        Raises ImageError for bytes that are no image, ContractError when the model gives NaN. Cancelling drops what
        has not begun.
        """
        loop = asyncio.get_running_loop()
        views = await loop.run_in_executor(self._decoders, self._views_of, image, protocol)
        results = await asyncio.wrap_future(self._compute.submit(views, keep_windows=keep_windows))
        # Not in the decoders' threads: an image that is done should not wait behind others that have just come.
        return await asyncio.to_thread(lambda: answer(combine(protocol, results)))

    def _views_of(self, image: bytes, protocol: Protocol) -> list[ViewImage]:
        return views_of(decode_rgb(image, self._limits), protocol)

    def heat_maps(self, image: bytes, protocol: Protocol, classified: Classified) -> bytes:
        """Draw an image beside the heat maps of its best classes, as a PNG file.

        It is decoded again: kept from the first time, the pixels of every image that waits would fill the memory.
        """
        pixels = decode_rgb(image, self._limits)
        return png_bytes(draw_heat_maps(pixels, classified, self.session.contract, protocol))

    def close(self) -> None:
        """Finish what waits and end the compute thread."""
        self._compute.close()
