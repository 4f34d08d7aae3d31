"""One served model: encoded bytes in, an answer out, with no arithmetic on the event loop."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from evaluator.engine.answer import Answer, answer_of
from evaluator.engine.batching import MAX_PIXELS
from evaluator.engine.classify import Classified, combine
from evaluator.engine.overlay import draw_heat_maps, png_bytes
from evaluator.engine.session import Session
from evaluator.errors import Overloaded, UsageError
from evaluator.imaging.decode import DecodeLimits, decode_image, decode_rgb
from evaluator.imaging.resize import resized_size
from evaluator.imaging.views import ViewImage, make_views
from evaluator.protocols import Protocol
from evaluator.serving.compute import ComputeThread

Result = TypeVar("Result")

MAX_WAITING = 128  # images: at `multi-scale` of model A about 0.5 GB of views, and minutes of work for a CPU
MAX_WAITING_BYTES = 2**28  # of encoded images, beside the one that is let in whatever its size


class Classifier:
    """A session behind its compute thread, and the threads that decode for it.

    name: under which it is served; file: last part of the model file's path; decoders: threads shared by all models;
    limits: what an image may be; max_waiting: calls that may wait for an answer.
    """

    def __init__(
        self,
        name: str,
        file: str,
        session: Session,
        decoders: ThreadPoolExecutor,
        limits: DecodeLimits,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.name = name
        self.file = file
        self.session = session
        self._decoders = decoders
        self._limits = limits
        self._max_waiting = max_waiting
        self._waiting = 0
        self._waiting_bytes = 0
        self._compute = ComputeThread(session, name)

    @contextmanager
    def admitted(self, size: int) -> Iterator[None]:
        """Count an image of `size` bytes among those that wait while the block runs.

        Raises Overloaded when enough images, or enough bytes, wait already.
        """
        if self._waiting >= self._max_waiting or (self._waiting and self._waiting_bytes + size > MAX_WAITING_BYTES):
            raise Overloaded(
                f"{self._waiting} images of {self._waiting_bytes} bytes wait for model '{self.name}' already. "
                "Try again later"
            )
        self._waiting += 1
        self._waiting_bytes += size
        try:
            yield
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size

    async def answer(self, image: bytes, protocol: Protocol, top: int, *, heatmap: bool) -> Answer:
        """Classify one encoded image and tell its best classes; see `classify` for the errors."""

        def tell(classified: Classified) -> Answer:
            picture = self._heat_maps(image, protocol, classified) if heatmap else b""
            return answer_of(self.session, self.name, protocol, classified, top, picture)

        return await self.classify(image, protocol, tell, keep_windows=heatmap)

    async def classify(
        self, image: bytes, protocol: Protocol, tell: Callable[[Classified], Result], *, keep_windows: bool = False
    ) -> Result:
        """Classify one encoded image; `tell` makes of the result what the caller needs, in a thread.

        keep_windows: with the window scores that heat maps need.
        Raises ImageError for bytes that are no image, UsageError for a view that is too large, ContractError when the
        model gives NaN. Cancelling drops what has not begun.
        """
        loop = asyncio.get_running_loop()
        views = await loop.run_in_executor(self._decoders, self._views_of, image, protocol)
        results = await asyncio.wrap_future(self._compute.submit(views, keep_windows=keep_windows))
        # Not in the decoders' threads: an image that is done should not wait behind others that have just come.
        return await asyncio.to_thread(lambda: tell(combine(protocol, results)))

    def _views_of(self, image: bytes, protocol: Protocol) -> list[ViewImage]:
        decoded = decode_image(image, self._limits, apply_exif=protocol.apply_exif)
        self._check_size(decoded.height, decoded.width, protocol)
        return make_views(decoded, protocol)

    def _check_size(self, height: int, width: int, protocol: Protocol) -> None:
        """Refuse views that would take gigabytes: more pixels than a batch may have, or than `multi-scale` needs.

        All scales of an image wait together, so that they are bounded too: by twice that, enough for SPP-net's six.
        """
        limit = max(MAX_PIXELS, protocol.long_side_cap * max(self.session.contract.default_scales) ** 2)
        sizes = [resized_size(height, width, scale, protocol.long_side_cap) for scale in protocol.scales]
        rows, columns = max(sizes, key=lambda size: size[0] * size[1])
        if rows * columns > limit:
            raise UsageError(
                f"protocol {protocol.name}: this image would be seen as {rows}x{columns} pixels, more than the "
                f"{limit} that this server takes in one view. Use a smaller scale, or `prelunet classify --model`"
            )
        if (total := sum(rows * columns for rows, columns in sizes)) > 2 * limit:
            raise UsageError(
                f"protocol {protocol.name}: all scales of this image together have {total} pixels, more than the "
                f"{2 * limit} that this server takes. Use fewer or smaller scales, or `prelunet classify --model`"
            )

    def _heat_maps(self, image: bytes, protocol: Protocol, classified: Classified) -> bytes:
        """Draw an image beside the heat maps of its best classes, as a PNG file.

        It is decoded again: kept from the first time, the pixels of every image that waits would fill the memory.
        """
        pixels = decode_rgb(image, self._limits, apply_exif=protocol.apply_exif)
        return png_bytes(draw_heat_maps(pixels, classified, self.session.contract, protocol))

    def close(self) -> None:
        """Finish what waits and end the compute thread."""
        self._compute.close()
