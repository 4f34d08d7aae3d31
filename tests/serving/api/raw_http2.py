"""HTTP/2 by hand (RFC 9113), for misbehaving clients that gRPC's own cannot simulate."""

import asyncio
import struct
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4
DEFAULT_WINDOW = 65_535  # bytes
MAX_FRAME = 2**14  # bytes of the payload
REFUSED_STREAM, CANCEL, ENHANCE_YOUR_CALM = 7, 8, 11
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call_headers(path: str, *more: tuple[str, str]) -> bytes:
    """Return the header block (RFC 7541: literals without indexing) that starts a gRPC call. more: names and values."""
    headers = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"),
        ("content-type", "application/grpc"), ("te", "trailers"), *more,
    ]  # fmt: skip
    parts = [bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in headers]
    return b"".join(parts)


def reset_call(path: str, stream: int) -> bytes:
    """Return the frames that start a gRPC call and reset it at once."""
    begin = frame(HEADERS, call_headers(path), flags=END_HEADERS, stream=stream)
    return begin + frame(RST_STREAM, struct.pack(">I", CANCEL), stream=stream)


def message(data: bytes, length: int | None = None, *, compressed: bool = False) -> bytes:
    """Return a gRPC message. length: that it announces, if not its own; compressed: whether `data` is."""
    return bytes([compressed]) + struct.pack(">I", len(data) if length is None else length) + data


@dataclass
class Connection:
    """A connection to a server.

    polite: acknowledges settings and pings; frames: kind, flags and payload of each received frame; closed, ended: the
    connection and its streams, by the server; granted: bytes of a stream, or of all (0), besides the first window.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    polite: bool = False
    frames: list[tuple[int, int, bytes]] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: defaultdict[int, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    granted: Counter[int] = field(default_factory=Counter)
    first_window: int = DEFAULT_WINDOW

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    def count(self, kind: int, *, flags: int = 0) -> int:
        return sum(1 for found, own_flags, _ in self.frames if found == kind and own_flags & 1 == flags)

    async def until(self, kind: int, *, flags: int = 0, times: int = 1) -> None:
        """Wait until this number of frames of a kind has arrived."""
        async with asyncio.timeout(20):
            while self.count(kind, flags=flags) < times:
                self.changed.clear()
                await self.changed.wait()

    async def send_data(self, stream: int, data: bytes) -> None:
        """Send DATA frames as the server's flow control allows; give up when it ends the stream or the connection."""
        sent = 0
        while sent < len(data) and not self.ended[stream].is_set() and not self.closed.is_set():
            allowed = min(self.first_window + self.granted[stream] - sent, DEFAULT_WINDOW + self.granted[0], MAX_FRAME)
            if allowed <= 0:
                self.changed.clear()
                await self.changed.wait()
                continue
            payload = data[sent : sent + allowed]
            self.granted[0] -= len(payload)
            sent += len(payload)
            self.send(frame(DATA, payload, stream=stream))
            await self.writer.drain()

    @property
    def error(self) -> int | None:
        """Return the error code of the server's GOAWAY, None if it sent none."""
        return next((int.from_bytes(payload[4:8], "big") for kind, _, payload in self.frames if kind == GOAWAY), None)

    async def listen(self) -> None:
        try:
            while True:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                self.frames.append((head[3], head[4], payload))
                self._obey(head[3], head[4], int.from_bytes(head[5:], "big"), payload)
                self.changed.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            for event in (*self.ended.values(), self.closed, self.changed):
                event.set()

    def _obey(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.ended[stream].set()
        elif kind == WINDOW_UPDATE:
            self.granted[stream] += int.from_bytes(payload, "big")
        elif kind in {SETTINGS, PING} and not flags & ACK and self.polite:
            settings = dict(struct.iter_unpack(">HI", payload)) if kind == SETTINGS else {}
            self.first_window = settings.get(INITIAL_WINDOW_SIZE, self.first_window)
            self.send(frame(kind, payload if kind == PING else b"", flags=ACK))


@asynccontextmanager
async def connection(
    address: str, greeting: bytes = PREFACE + frame(SETTINGS), *, source: str = "127.0.0.1", polite: bool = False
) -> AsyncIterator[Connection]:
    """Connect from the address `source` and send `greeting`."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    there = Connection(reader, writer, polite)
    listening = asyncio.create_task(there.listen())
    there.send(greeting)
    try:
        yield there
    finally:
        listening.cancel()
        writer.close()
