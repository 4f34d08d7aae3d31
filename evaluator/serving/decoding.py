"""From an encoded image to the resized pixels of its views, in a thread of the server or in a process.

A process has limits on its memory and processor time, and is killed when nobody waits for its image. The two sides
communicate over a socket pair. Per image:

    server → process    PrepareOptions and the encoded image
    process → server    Reservation: the memory that it will take; the server answers once that much is free
    process → server    Prepared and the pixels, or Refused

What the process sends is never unpickled: a broken decoder could send anything.
"""

import logging
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from ..arrays import UInt8Array
from ..errors import DeadlinePassed, ImageError, OutOfMemory, PreluNetError, UsageError
from ..imaging.decode import decode_image, silence_decoders
from ..imaging.limits import DecodeLimits
from ..imaging.resize import panel_picture, resized_size
from ..imaging.views import resized_of
from ..protocols import EvaluationProtocol

CPU_SECONDS = 30  # per image; the largest accepted one takes about 5
REPLY_SECONDS = 4 * CPU_SECONDS  # until a reply; a process with a quarter of a core has used up its time by then
STALL_SECONDS = 20.0  # in which the process takes or sends no byte; its start takes about one
PROCESS_BYTES = 50 * 2**20  # of a process with nothing to do; measured: 36 MB
TOTAL_PIXELS_FACTOR = 3  # all its scales together, in pixels of the largest allowed view; the protocol resnet has 2.2
SMALL_BYTES = 2**24  # images that take no more, half a megapixel of any kind, do not wait for memory behind large ones
_NICE = 10  # a CPU model and cheap images come first
_SPARE_BYTES = 2**27  # address space beyond what an image was estimated to take
_POLL_SECONDS = 0.05  # between checks whether the caller still waits
_START = "import sys; from prelunet.evaluator.serving.decoding import work; work(int(sys.argv[1]))"
_ERRORS: dict[str, type[PreluNetError]] = {kind.__name__: kind for kind in (ImageError, UsageError, OutOfMemory)}


class PrepareOptions(msgspec.Struct, frozen=True):
    """What to do with an image.

    max_view_pixels: of a view; all scales together may have TOTAL_PIXELS_FACTOR times that; picture: whether to make
    one for heat maps.
    """

    protocol: EvaluationProtocol
    limits: DecodeLimits
    max_view_pixels: int
    picture: bool


class PreparedImage(msgspec.Struct, frozen=True):
    """An image at each scale.

    height, width: of the decoded image; resized: by scale, the pixels, uint8 (h, w, 3), and whether they were capped;
    picture: the whole image at the size of a heat map's panel, None if not requested.
    """

    height: int
    width: int
    resized: Mapping[int, tuple[UInt8Array, bool]]
    picture: UInt8Array | None


def prepare_image(
    image: bytes, options: PrepareOptions, reserve: Callable[[int], None] = lambda _bytes: None
) -> PreparedImage:
    """Decode and resize an image.

    reserve: called before any pixel is decoded with the most bytes that this takes; may block.
    Raises ImageError for bytes that are not an acceptable image, UsageError if a view would be too large.
    """
    protocol = options.protocol
    decoded = decode_image(
        image, options.limits, apply_exif=protocol.apply_exif, preparation=protocol.preparation, reserve=reserve
    )
    _check_size(decoded.height, decoded.width, protocol, options.max_view_pixels)
    resized = resized_of(decoded, protocol)
    picture = panel_picture(decoded) if options.picture else None
    return PreparedImage(decoded.height, decoded.width, resized, picture)


def _check_size(height: int, width: int, protocol: EvaluationProtocol, limit: int) -> None:
    """Refuse views that would take gigabytes. All scales of an image wait together, so their total is limited too."""
    sizes = [
        resized_size(height, width, scale, protocol.long_side_cap, protocol.preparation) for scale in protocol.scales
    ]
    rows, columns = max(sizes, key=lambda size: size[0] * size[1])
    if rows * columns > limit:
        raise UsageError(
            f"protocol {protocol.name}: a view of this image would have {rows}x{columns} pixels, more than this "
            f"server's limit of {limit}. Use a smaller scale, or the model file without a server"
        )
    if (total := sum(rows * columns for rows, columns in sizes)) > TOTAL_PIXELS_FACTOR * limit:
        raise UsageError(
            f"protocol {protocol.name}: all scales of this image together have {total} pixels, more than this "
            f"server's limit of {TOTAL_PIXELS_FACTOR * limit}. Use fewer or smaller scales, or the model file without "
            "a server"
        )


class Reservation(msgspec.Struct, tag=True):
    """Asks for memory. bytes: the most that decoding and resizing will take."""

    bytes: int


class Prepared(msgspec.Struct, tag=True):
    """Announces a `PreparedImage`, whose pixels follow, each image's in a message of its own.

    resized: by scale, the height and width, and whether they were capped; picture: its height and width.
    """

    height: int
    width: int
    resized: dict[int, tuple[int, int, bool]]
    picture: tuple[int, int] | None


class Refused(msgspec.Struct, tag=True):
    """An error, by the name of its class."""

    error: str
    text: str


_decode_reply = msgspec.json.Decoder(Reservation | Prepared | Refused).decode


class DecodeProcess:
    """A process that prepares one image at a time. It starts with its first image, and again after it was killed."""

    def __init__(self) -> None:
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def prepare(
        self, image: bytes, options: PrepareOptions, reserve: Callable[[int], None], given_up: Callable[[], bool]
    ) -> PreparedImage:
        """Prepare an image in the process; see `prepare_image`.

        reserve: blocks until that many bytes are free; given_up: returns whether nobody waits for the image any more.
        The process is killed then, which raises DeadlinePassed. If it dies or stops, the image is tried once more.
        Raises ImageError if the image kills the process twice, or takes more than CPU_SECONDS.
        """
        for _ in range(2):
            connection = self._connected()
            try:
                connection.send(options)
                connection.send_bytes(image)
                return _received_image(connection, reserve, given_up)
            except DeadlinePassed:
                self.close()
                raise
            except (EOFError, OSError, ValueError):  # the process has died, has stopped, or sends nonsense
                if self.close() == -signal.SIGXCPU:
                    raise ImageError(
                        f"the image takes more than {CPU_SECONDS} s of processor time to decode. Save it again as a "
                        "baseline JPEG, or send a smaller one"
                    ) from None
        raise ImageError("the image makes its decoder fail. Save it again, or in another format")

    def _connected(self) -> Connection:
        if self._running is not None and self._running[0].poll() is not None:  # killed while it had nothing to do
            self.close()
        if self._running is None:
            ours, theirs = socket.socketpair()
            stall = struct.pack("ll", int(STALL_SECONDS), int(STALL_SECONDS % 1 * 1e6))  # struct timeval
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # makes the calls of Connection raise OSError
                ours.setsockopt(socket.SOL_SOCKET, option, stall)
            with theirs:
                command = [sys.executable, "-P", "-c", _START, str(theirs.fileno())]
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)  # noqa: S603
            self._running = process, Connection(ours.detach())
        return self._running[1]

    def close(self) -> int:
        """Kill the process and return its exit code; if it was about to exit by itself, that of this."""
        if self._running is None:
            return 0
        (process, connection), self._running = self._running, None
        connection.close()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.1)
        process.kill()
        return process.wait()


def _received_image(
    connection: Connection, reserve: Callable[[int], None], given_up: Callable[[], bool]
) -> PreparedImage:
    while True:
        latest = time.monotonic() + REPLY_SECONDS
        while not connection.poll(_POLL_SECONDS):
            if given_up():
                raise DeadlinePassed("nobody waits for this image any more")
            if time.monotonic() > latest:
                raise TimeoutError
        match _decode_reply(connection.recv_bytes()):
            case Reservation(size):
                reserve(size)
                connection.send_bytes(b"go on")
            case Refused(name, text):
                raise _ERRORS.get(name, ImageError)(text)
            case Prepared(height, width, sizes, picture_size):
                resized = {scale: (_pixels(connection, *size), capped) for scale, (*size, capped) in sizes.items()}
                picture = None if picture_size is None else _pixels(connection, *picture_size)
                return PreparedImage(height, width, resized, picture)


def _pixels(connection: Connection, height: int, width: int) -> UInt8Array:
    return np.frombuffer(connection.recv_bytes(), np.uint8).reshape(height, width, 3)


# In the process.


def work(descriptor: int) -> None:
    """Prepare images until the server closes the connection. descriptor: of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # often sent to the whole group
        signal.signal(number, signal.SIG_IGN)  # the server decides when this process ends
    os.nice(_NICE)
    silence_decoders()
    logging.disable()  # Pillow's remarks; the server logs what is refused
    connection = Connection(descriptor)
    with suppress(EOFError, OSError):
        while True:
            options: PrepareOptions = connection.recv()
            image = connection.recv_bytes()
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS)
            _prepare(connection, options, image)


def _prepare(connection: Connection, options: PrepareOptions, image: bytes) -> None:
    def reserve(size: int) -> None:
        connection.send_bytes(msgspec.json.encode(Reservation(size)))
        connection.recv_bytes()
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, address_space + size + _SPARE_BYTES)

    try:
        prepared = prepare_image(image, options, reserve)
    except PreluNetError as error:
        connection.send_bytes(msgspec.json.encode(Refused(type(error).__name__, str(error))))
        return
    finally:
        _limit(resource.RLIMIT_AS, None)
    sizes = {scale: (len(pixels), len(pixels[0]), capped) for scale, (pixels, capped) in prepared.resized.items()}
    picture = prepared.picture
    picture_size = None if picture is None else (len(picture), len(picture[0]))
    connection.send_bytes(msgspec.json.encode(Prepared(prepared.height, prepared.width, sizes, picture_size)))
    images = [pixels for pixels, _ in prepared.resized.values()]
    for pixels in images if picture is None else [*images, picture]:
        connection.send_bytes(pixels.data.cast("B"))


def _limit(kind: int, limit: int | None) -> None:
    """Set a limit of this process, no higher than the one that it was started with; None: no other than that."""
    _, hard = resource.getrlimit(kind)
    if limit is None or (hard != resource.RLIM_INFINITY and limit > hard):
        limit = hard
    resource.setrlimit(kind, (limit, hard))
