"""Rotation: calls go on while certificates and tokens are replaced, by careful scripts and by sloppy ones."""

import asyncio
import itertools
import random
import shutil
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path

from benchmarks.common.runner import Case
from benchmarks.common.server_process import PreluNetServer
from benchmarks.reliability.cases import NAME, Json, ServerTestBed, claim, verdict
from benchmarks.serving.load import Http, Workload
from benchmarks.serving.peers import TLS
from prelunet.evaluator.client import AsyncClient, Credentials
from prelunet.evaluator.errors import PreluNetError, Unauthenticated
from prelunet.evaluator.serving.access import create_token

CLIENTS = 16  # half over gRPC, half over HTTP
ROTATIONS, SECONDS = 20, 60.0
CALLS_PER_CONNECTION = 40  # at most
READ_WITHIN = 15.0  # seconds until the server uses new files: two looks, 1 s apart, on a busy machine
HALF_WRITTEN, HALF_REPLACED = 0.3, 2.5  # seconds; the second is longer than two looks at the files
DOORS = ("grpc", "http")


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Yield the one case, whose control is part of it."""
    rotations, seconds = bed.reduced(ROTATIONS, len(_WRITERS)), SECONDS if not bed.tiny else 1.0
    clients = bed.reduced(CLIENTS, 4)
    yield claim(
        "rotation",
        f"{clients} clients, half over gRPC and half over HTTP, call over TLS with tokens for at least {seconds:g} s, "
        f"often on new connections, while certificate, key and token file are replaced {rotations} times, by rename, "
        "in place, in halves, and the key long after the certificate; an old token stays valid until the next "
        "rotation: no call fails; then a token is removed without overlap: UNAUTHENTICATED over both",
        {"clients": clients, "rotations": rotations, "seconds": seconds, "seed": bed.seed},
        2 * seconds,
        partial(_rotate, bed, clients, rotations, seconds),
    )


async def _by_rename(new: Path, file: Path) -> None:
    shutil.copyfile(new, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


async def _in_place(new: Path, file: Path) -> None:
    shutil.copyfile(new, file)


async def _in_halves(new: Path, file: Path) -> None:
    content = new.read_bytes()
    with file.open("wb", buffering=0) as opened:
        opened.write(content[: len(content) // 2])
        await asyncio.sleep(HALF_WRITTEN)
        opened.write(content[len(content) // 2 :])


async def _certificate_long_before_key(new: Path, file: Path) -> None:
    await _in_place(new, file)
    if file.suffix == ".pem":
        await asyncio.sleep(HALF_REPLACED)


_WRITERS = (_by_rename, _in_place, _in_halves, _certificate_long_before_key)


class _Rotation:
    """The files of a server and of its clients. secrets: of all tokens so far."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key, self.tokens = folder / "tls.pem", folder / "tls.key", folder / "tokens.toml"
        self.token, self._new = folder / "token", folder / "new"
        self.secrets: list[str] = []
        self._lines = ""
        shutil.copyfile(TLS / "server.pem", self.certificate)
        shutil.copyfile(TLS / "server.key", self.key)
        self.tokens.write_text(self.new_token(overlap=False))
        self.use_new_token()

    def new_token(self, *, overlap: bool) -> str:
        """Return the contents of a token file with a new token. overlap: with the one before it, too."""
        secret, lines = create_token(f"client-{len(self.secrets)}", ["classify"])
        self.secrets.append(secret)
        old, self._lines = self._lines, lines
        return f"{old * overlap}\n{lines}"

    def use_new_token(self) -> None:
        """Let the clients use the last token from their next call on."""
        self._write_new(self.secrets[-1]).replace(self.token)

    def _write_new(self, text: str) -> Path:
        self._new.touch(0o600)
        self._new.write_text(text)
        return self._new

    async def replace(self, number: int) -> str:
        """Replace certificate, key and tokens; return the new certificate."""
        write, pair = _WRITERS[number % len(_WRITERS)], TLS / ("server" if number % 2 else "server-2")
        await write(self._write_new(self.new_token(overlap=True)), self.tokens)
        await write(pair.with_suffix(".pem"), self.certificate)
        await write(pair.with_suffix(".key"), self.key)
        return pair.with_suffix(".pem").read_text()


async def _rotate(bed: ServerTestBed, clients: int, rotations: int, seconds: float) -> Json:
    folder = bed.folder / "rotation"
    folder.mkdir()
    files = _Rotation(folder)
    image = bed.easy_pictures[0]
    calls, connections = dict.fromkeys(DOORS, 0), dict.fromkeys(DOORS, 0)
    failures: list[str] = []
    stop, late = asyncio.Event(), 0.0
    options = ["--tls-cert", files.certificate, "--tls-key", files.key, "--token-file", files.tokens, "--http-port", 0]
    with bed.serve(*map(str, options)) as server:

        async def client(number: int, door: str) -> None:
            rng = random.Random(f"{bed.seed} {number}")
            try:
                while not stop.is_set():
                    connections[door] += 1
                    async with aclosing(_connection(door, server, files.token, image)) as connection:
                        classify = await anext(connection)
                        for _ in range(rng.randint(1, CALLS_PER_CONNECTION)):
                            await classify()
                            calls[door] += 1
                            if stop.is_set():
                                break
                            if bed.tiny:
                                await asyncio.sleep(0.1)
            except Exception as error:
                failures.append(f"{door}: {type(error).__name__}: {str(error)[:200]}")

        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, door in zip(range(clients), itertools.cycle(DOORS)):
                group.create_task(client(number, door))
            for number in range(rotations):
                certificate, changed = await files.replace(number), time.monotonic()
                await _until(partial(_loaded, server, number + 1, certificate))
                late = max(late, time.monotonic() - changed)
                files.use_new_token()
                await asyncio.sleep(max(0.0, begun + seconds * (number + 1) / rotations - time.monotonic()))
            stop.set()
        metrics = server.metrics()
        refused = {door: await _refusal(door, server, files, image) for door in DOORS}
        ended = await asyncio.to_thread(server.stop)
    texts = [ended.log, ended.output, *failures]
    return verdict(
        {
            "no_call_failed": not failures,
            "every_door_was_called": min(calls.values()) > clients * rotations,
            "a_token_removed_without_overlap_is_refused": set(refused.values()) == {"UNAUTHENTICATED"},
            "no_token_in_the_log": not [secret for secret in files.secrets if any(secret in text for text in texts)],
            "exit_code_0": ended.code == 0,
        },
        calls=calls,
        connections=connections,
        rotations=rotations,
        seconds=round(time.monotonic() - begun, 1),
        half_replaced_files_refused=metrics("reloads_total", files="TLS files", outcome="refused"),
        slowest_rotation_seconds=round(late, 1),
        refused_without_overlap=refused,
        failures=failures[:10],
    )


async def _connection(
    door: str, server: PreluNetServer, token: Path, image: bytes
) -> AsyncGenerator[Callable[[], Awaitable[object]], None]:
    """Connect, yield a function that makes a call with the token that the file has then, and disconnect."""
    if door == "grpc":
        credentials = Credentials(tls_ca=TLS / "ca.pem", token_file=token)
        async with AsyncClient(server.address, credentials=credentials, retries=False) as client:
            yield lambda: client.classify(image, protocol="center")
        return
    http = Http(Workload(server.http, "HTTP", NAME, "center", 1, 0, 0, 0.0, tls_ca=str(TLS / "ca.pem")), [image])

    async def classify() -> None:
        http.token = token.read_text()
        await http(0)

    await http.connect()
    try:
        yield classify
    finally:
        await http.close()


async def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + READ_WITHIN
    while not await asyncio.to_thread(condition):
        if time.monotonic() > end:
            raise RuntimeError(f"the server has not used changed files within {READ_WITHIN:g} s")
        await asyncio.sleep(0.1)


def _loaded(server: PreluNetServer, tokens: int, certificate: str) -> bool:
    """Return whether the server has loaded so many token files, and has a certificate at both ports."""
    metrics = server.metrics()
    return metrics("reloads_total", files="tokens", outcome="loaded") >= tokens and all(
        ssl.get_server_certificate((host, int(port)), timeout=READ_WITHIN) == certificate
        for host, _, port in (address.rpartition(":") for address in (server.address, server.http))
    )


async def _refusal(door: str, server: PreluNetServer, files: _Rotation, image: bytes) -> str:
    """Remove the token of a client without overlap; return the status of its first failed call."""
    files.use_new_token()
    async with aclosing(_connection(door, server, files.token, image)) as connection:
        classify = await anext(connection)
        await classify()
        files.tokens.write_text(files.new_token(overlap=False))
        end = time.monotonic() + READ_WITHIN
        while time.monotonic() < end:
            try:
                await classify()
            except Unauthenticated:
                return "UNAUTHENTICATED"
            except (PreluNetError, RuntimeError) as error:
                return "UNAUTHENTICATED" if '"code":"UNAUTHENTICATED"' in str(error) else str(error)[:200]
            await asyncio.sleep(0.1)
    return "accepted"
