"""HTTP/2 by hand (RFC 9113), for misbehaving clients that gRPC's own cannot simulate."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4
REFUSED_STREAM, CANCEL, ENHANCE_YOUR_CALM = 7, 8, 11
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call_headers(path: str) -> bytes:
    """Return the header block (RFC 7541: literals without indexing) that starts a gRPC call."""
    headers = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"),
        ("content-type", "application/grpc"), ("te", "trailers"),
    ]  # fmt: skip
    parts = [bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in headers]
    return b"".join(parts)


def reset_call(path: str, stream: int) -> bytes:
    """Return the frames that start a gRPC call and reset it at once."""
    begin = frame(HEADERS, call_headers(path), flags=END_HEADERS, stream=stream)
    return begin + frame(RST_STREAM, struct.pack(">I", CANCEL), stream=stream)


@dataclass
class Connection:
    """A connection to a server. frames: kind, flags and payload of each received frame; closed: by the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    frames: list[tuple[int, int, bytes]] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

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
                self.changed.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()


@asynccontextmanager
async def connection(address: str, greeting: bytes = PREFACE + frame(SETTINGS)) -> AsyncIterator[Connection]:
    """Connect and send `greeting`."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    there = Connection(reader, writer)
    listening = asyncio.create_task(there.listen())
    there.send(greeting)
    try:
        yield there
    finally:
        listening.cancel()
        writer.close()
