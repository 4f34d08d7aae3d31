"""Replace three servers one after the other under the calls of 16 clients; no call may fail.

    python -m benchmarks.reliability.rolling_restart [--only NAME ...] [--tiny] [--seed N] [--output FILE]

haproxy: behind HAProxy with deploy/haproxy/haproxy.cfg; each server is stopped (SIGTERM), drains and starts again
at its address. The clients are plain gRPC and never retry.
nginx-grpc: the same behind nginx with deploy/nginx/prelunet.conf, where each server is marked `down` before its stop.
dns: as on Kubernetes behind a headless Service (`dns:///NAME:PORT`, round_robin): a server at a new address starts and
is announced; 30 s later, as in deploy/kubernetes, an old one is withdrawn and stopped in the same moment. A name server
on loopback takes the place of the cluster's. The clients are the package's own (dns-client), and plain gRPC with its
health checking and without retries (dns-grpc).
nginx, http: over HTTP, with restarts as behind HAProxy. nginx has no health checks: it finds out that a server is away
when a connection is refused. So do the clients of `http`, which call the servers themselves. All keep connections
between calls. Every fourth pauses for longer than the lame-duck period, so that connections are idle at its end.
haproxy-tls, nginx-grpc-tls, nginx-tls: the same with TLS between clients, proxy and servers, as those files say.

The servers are `prelunet serve` processes with the demo net. Needs Debian's haproxy and nginx-light. All cases take
about fifteen minutes.

Exit codes: 0 no call failed, 1 a call failed or a case could not run, 3 the time limit left some cases out.
"""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Self

import grpc
import httpx

from benchmarks.common.results import RESULTS, ROOT, circumstances, digest_of, environment
from benchmarks.common.runner import Case, Runner, command_line
from benchmarks.common.server_process import PreluNetServer, ProcessExit, ServerProcess, free_port
from benchmarks.reliability.cases import Json, ServerTestBed, claim, verdict
from benchmarks.reliability.draining import CALL_TIMEOUT, Callers
from benchmarks.reliability.table import not_held, table
from prelunet.evaluator.client import Client
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc

PACKAGES = ("prelunet", "onnxruntime", "grpcio")
MEASURED = (
    "evaluator", "benchmarks/reliability/rolling_restart.py", "benchmarks/reliability/draining.py",
    "benchmarks/common/server_process.py", "deploy/haproxy/haproxy.cfg", "deploy/nginx/prelunet.conf",
)  # fmt: skip
LIMIT = 1500  # seconds
SERVERS, CLIENTS = 3, 16
WINDOW = 5.0  # seconds of lame duck, as in deploy/
PAUSE = 2.0  # seconds between two restarts behind HAProxy, which checks every half second
MIN_READY = 30.0  # seconds between two replacements with DNS; gRPC looks up a name again after 30 s at the earliest
NAME = "prelunet.test"
IDLE = WINDOW + 1  # seconds between two calls of a client that pauses
NGINX_MAIN = """
user root; daemon off; pid nginx.pid; error_log stderr warn;
events { worker_connections 1000; }
http {
  access_log off; client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi;
  scgi_temp_path scgi; include prelunet.conf;
}
"""
NGINX_CONFIG = ROOT / "deploy" / "nginx" / "prelunet.conf"
HAPROXY_CONFIG = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
# gRPC's own health checking leaves a stopping server as soon as its health reports so.
HEALTH_CHECKING = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
Call = Callable[[], object]
Opened = AbstractContextManager[Call]
Withdraw = Callable[[str | None], None]  # tells a proxy that a server is going to stop, or that all are there again
CERTIFICATES = ROOT / "tests" / "data" / "tls"  # of localhost and 127.0.0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that are not in the file yet."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "rolling-restart.json", limit=LIMIT)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the pictures")
    options = parser.parse_args(words)
    facts = {"device": "cpu", "tiny": options.tiny, "source": digest_of(*MEASURED), "seed": options.seed}
    now = {**circumstances(__file__, options, PACKAGES, words), **facts}
    runner = Runner(options.output, "rolling-restart", now, options.limit)
    with ServerTestBed(options.seed, tiny=options.tiny) as bed:
        runner.run(_case(bed, name) for name in options.only)
    broken = not_held(runner.data)
    code = runner.finish(table(runner.data, "Rolling restarts"), (f"NOT held: {name}: {why}" for name, why in broken))
    return 1 if broken else code


def _case(bed: ServerTestBed, name: str) -> Case:
    sentence, work = CASES[name]

    async def test() -> Json:
        return work(bed)

    settings = {"servers": SERVERS, "clients": CLIENTS, "window": WINDOW}
    return claim(name, sentence, settings, SERVERS * (MIN_READY + WINDOW), test)


@contextmanager
def _own_client(address: str, image: bytes) -> Iterator[Call]:
    with Client(address, timeout=CALL_TIMEOUT) as client:
        yield partial(client.classify, image, protocol="center")


@contextmanager
def _plain_grpc(
    address: str, image: bytes, config: Json | None = None, *, tls: bool = False, unseen: bool = False
) -> Iterator[Call]:
    """Yield a call on a channel of its own that is never retried.

    unseen: but sent again, as gRPC does by default, if the other end says that it has not seen it.
    """
    options: list[tuple[str, int | str]] = [("grpc.use_local_subchannel_pool", 1)]
    options.append(("grpc.enable_retries", int(unseen)))
    options.append(("grpc.service_config", json.dumps(config or {})))
    trusted = grpc.ssl_channel_credentials((CERTIFICATES / "ca.pem").read_bytes())
    opened = grpc.secure_channel(address, trusted, options) if tls else grpc.insecure_channel(address, options)
    with opened as channel:
        classify = pb_grpc.PreluNetServiceStub(channel).Classify
        yield partial(classify, pb.ClassifyRequest(image=image, protocol="center"), timeout=CALL_TIMEOUT)


@contextmanager
def _http(addresses: str, image: bytes, *, tls: bool = False) -> Iterator[Call]:
    """Yield a call that is sent once, to the first of some addresses, A,B,…, that accepts a connection."""
    servers, scheme = addresses.split(","), "https" if tls else "http"
    trusted = ssl.create_default_context(cafile=CERTIFICATES / "ca.pem")
    with httpx.Client(timeout=CALL_TIMEOUT, trust_env=False, verify=trusted) as client:

        def classify() -> None:
            while True:
                try:
                    client.post(
                        f"{scheme}://{servers[0]}/v1/classify?protocol=center", content=image
                    ).raise_for_status()
                    return
                except httpx.ConnectError:  # another error is a lost call
                    servers.append(servers.pop(0))

        yield classify


class _Fleet:
    """Servers on addresses of loopback, all on the same ports. Use it in a `with` block, which kills them."""

    def __init__(self, bed: ServerTestBed, *, tls: bool = False) -> None:
        self.port, self.http_port, self.metrics_port = free_port(), free_port(), free_port()
        self._bed, self.tls = bed, tls
        self.servers: dict[str, PreluNetServer] = {}
        self.ends: list[ProcessExit] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers.values():
            server.kill()

    def start(self, host: str) -> None:
        """Start a server and wait until it is ready."""
        proxied = ("--client-address-key", "x-forwarded-for", "--trusted-proxies", "127.0.0.0/8")
        ports = [
            "--port", str(self.port), "--http-port", str(self.http_port), "--metrics-port", str(self.metrics_port)
        ]  # fmt: skip
        pair = (f"{CERTIFICATES}/server.pem", "--tls-key", f"{CERTIFICATES}/server.key")
        secured = ("--tls-cert", *pair) if self.tls else ()
        self.servers[host] = self._bed.serve("--host", host, *ports, "--lame-duck", str(WINDOW), *proxied, *secured)

    def stop(self, host: str) -> None:
        """Stop a server and wait for its end."""
        self.ends.append(self.servers.pop(host).stop())

    def result(self, callers: Callers, *, answered: bool, pause: float) -> Json:
        """Stop all servers and return the verdict. answered: whether each client got answers after each restart."""
        for host in list(self.servers):
            self.stop(host)
        return verdict(
            {
                "no_call_failed": not callers.failures,
                "answered_after_each": answered,
                "exit_code_0": {end.code for end in self.ends} == {0},
                "no_call_cut_off": all("no call was lost" in end.output for end in self.ends),
            },
            restarts=len(self.ends) - SERVERS,
            answers=len(callers.calls),
            failures=callers.failures[:10],
            slowest_call_seconds=round(max((end - begun for begun, end in callers.calls), default=0.0), 2),
            pause_seconds=pause,
        )


def _behind_one_address(
    bed: ServerTestBed,
    balanced: Callable[[ServerTestBed, _Fleet, Sequence[str]], AbstractContextManager[tuple[str, Withdraw]]],
    client: Callable[..., Opened],
    pauses: Sequence[float] = (0.0,),
    *,
    tls: bool = False,
) -> Json:
    """Restart each server at its address. balanced: yields the address for the clients."""
    hosts = [f"127.0.0.{number}" for number in range(11, 11 + SERVERS)]
    with _Fleet(bed, tls=tls) as fleet:
        for host in hosts:
            fleet.start(host)
        opened = partial(client, tls=tls)
        with balanced(bed, fleet, hosts) as (address, withdraw), _calling(bed, address, opened, pauses) as callers:
            answered = callers.wait_for_answers(CLIENTS)
            for host in hosts:
                withdraw(host)
                fleet.stop(host)
                fleet.start(host)
                withdraw(None)
                time.sleep(PAUSE)
                answered &= callers.wait_for_answers(CLIENTS)
        return fleet.result(callers, answered=answered, pause=PAUSE)


def _stay(_host: str | None) -> None:
    """Tell a proxy nothing: it finds out itself which servers it can reach."""


@contextmanager
def _direct(_bed: ServerTestBed, fleet: _Fleet, hosts: Sequence[str]) -> Iterator[tuple[str, Withdraw]]:
    yield ",".join(f"{host}:{fleet.http_port}" for host in hosts), _stay


@contextmanager
def _nginx(
    bed: ServerTestBed, fleet: _Fleet, _hosts: Sequence[str], *, grpc: bool = False
) -> Iterator[tuple[str, Withdraw]]:
    """Run nginx with the committed file. grpc: yield the address for gRPC, and withdraw servers."""
    (bed.folder / "nginx.conf").write_text(NGINX_MAIN, encoding="utf-8")
    file, ports = bed.folder / "prelunet.conf", {50050: free_port(), 8000: free_port()}
    text = _adapted(NGINX_CONFIG, bed, fleet)
    for stated, port in ports.items():
        text = text.replace(f"listen {stated}", f"listen 127.0.0.1:{port}")
    file.write_text(text, encoding="utf-8")
    with _proxy("nginx", bed, "-p", str(bed.folder), "-c", str(bed.folder / "nginx.conf")) as process:

        def withdraw(host: str | None) -> None:
            file.write_text(text.replace(f"{host}:{fleet.port} ", f"{host}:{fleet.port} down "), encoding="utf-8")
            process.send_signal(signal.SIGHUP)

        yield f"127.0.0.1:{ports[50050 if grpc else 8000]}", withdraw if grpc else _stay


@contextmanager
def _haproxy(bed: ServerTestBed, fleet: _Fleet, _hosts: Sequence[str]) -> Iterator[tuple[str, Withdraw]]:
    """Run HAProxy with the committed file, at other addresses; yield its own."""
    address, config = f"127.0.0.1:{free_port()}", bed.folder / "haproxy.cfg"
    text = re.sub(r"bind :\d+", f"bind {address}", _adapted(HAPROXY_CONFIG, bed, fleet))
    text = re.sub(r"(default-server .*) port \d+", rf"\1 port {fleet.metrics_port}", text)
    config.write_text(text, encoding="utf-8")
    with _proxy("haproxy", bed, "-f", str(config)):
        yield address, _stay


def _adapted(config: Path, bed: ServerTestBed, fleet: _Fleet) -> str:
    """Return a committed file with the addresses of the servers; with TLS, with what the file says to replace."""
    text = config.read_text(encoding="utf-8").replace("10.0.0.", "127.0.0.")
    text = text.replace(":50051", f":{fleet.port}").replace(":8080", f":{fleet.http_port}")
    if fleet.tls:
        text = re.sub(r"^( *).*# with TLS: ", r"\1", text, flags=re.MULTILINE)
        text = re.sub(r"/etc/(haproxy|nginx)/", f"{bed.folder}/", text).replace("flowers.example.org", "localhost")
        certificate, key = ((CERTIFICATES / f"server.{kind}").read_text() for kind in ("pem", "key"))
        (bed.folder / "proxy.pem").write_text(certificate + key, encoding="utf-8")  # HAProxy has both in one file
        (bed.folder / "proxy.key").write_text(key, encoding="utf-8")
        shutil.copyfile(CERTIFICATES / "ca.pem", bed.folder / "ca.pem")
    return text


@contextmanager
def _proxy(name: str, bed: ServerTestBed, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    program = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise RuntimeError(f"{name} is missing; on Debian: apt-get install --no-install-recommends haproxy nginx-light")
    with ServerProcess([program, *options], bed.folder / f"{name}.log", env=environment()) as server:
        time.sleep(PAUSE)  # for the first checks
        if not server.is_alive():
            raise RuntimeError(f"{name} did not start: {server.log[-1000:]}")
        try:
            yield server.process
        finally:
            server.stop()  # a SIGKILL would leave nginx's workers behind


def _behind_a_name(bed: ServerTestBed, client: Callable[[str, bytes], Opened]) -> Json:
    """Replace each server by one at a new address, as a roll-out on Kubernetes does."""
    hosts = [f"127.0.0.{number}" for number in range(11, 11 + 2 * SERVERS)]
    with _Fleet(bed) as fleet, _NameServer() as names:
        for host in hosts[:SERVERS]:
            fleet.start(host)
        names.addresses = hosts[:SERVERS]
        with _calling(bed, f"dns://{names.address}/{NAME}:{fleet.port}", client) as callers:
            answered = callers.wait_for_answers(CLIENTS)
            for old, new in zip(hosts, hosts[SERVERS:], strict=False):
                fleet.start(new)
                names.addresses = [*names.addresses, new]
                time.sleep(MIN_READY)
                names.addresses = [host for host in names.addresses if host != old]
                fleet.stop(old)
                answered &= callers.wait_for_answers(CLIENTS)
        return fleet.result(callers, answered=answered, pause=MIN_READY)


@contextmanager
def _calling(
    bed: ServerTestBed, address: str, client: Callable[[str, bytes], Opened], pauses: Sequence[float] = (0.0,)
) -> Iterator[Callers]:
    """Let clients call during the block, each on a connection of its own. pauses: in seconds, of one client each."""
    callers = Callers()
    with ExitStack() as opened, ThreadPoolExecutor(CLIENTS) as pool:
        for image, pause in islice(zip(cycle(bed.easy_pictures), cycle(pauses), strict=False), CLIENTS):
            pool.submit(callers.run, opened.enter_context(client(address, image)), pause)
        try:
            yield callers
        finally:
            callers.stop.set()
            pool.shutdown()


class _NameServer:
    """Answers each query for an A record with `addresses`, as a cluster's DNS does for a headless Service."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.sendto(b"", self._socket.getsockname())  # ends the thread
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(4096)
            if not query:
                return
            self._socket.sendto(self._answer(query), client)

    def _answer(self, query: bytes) -> bytes:
        """Return the response to a query (RFC 1035, section 4); of other types than A it is empty."""
        end = query.index(b"\0", 12) + 5  # name, type, class
        (kind,) = struct.unpack("!H", query[end - 4 : end - 2])
        addresses = self.addresses if kind == 1 else []
        head = query[:2] + struct.pack("!HHHHH", 0x8580, 1, len(addresses), 0, 0)
        records = (struct.pack("!HHHIH", 0xC00C, 1, 1, 5, 4) + socket.inet_aton(each) for each in addresses)
        return head + query[12:end] + b"".join(records)


_PLAIN: Mapping[str, tuple[str, Callable[..., Json]]] = {
    "haproxy": (
        "each of three servers behind HAProxy is stopped, drains and starts again: no call of clients that never retry "
        "fails",
        partial(_behind_one_address, balanced=_haproxy, client=_plain_grpc),
    ),
    "dns-client": (
        "each of three servers behind a name is replaced by one at another address: no call of the package's client "
        "fails",
        partial(_behind_a_name, client=_own_client),
    ),
    "dns-grpc": (
        "the same for clients of plain gRPC with health checking that never retry",
        partial(_behind_a_name, client=partial(_plain_grpc, config=HEALTH_CHECKING)),
    ),
    "nginx-grpc": (
        "each of three servers behind nginx is marked down, stopped, drains and starts again: no call of clients "
        "without a retry policy fails",
        partial(_behind_one_address, balanced=partial(_nginx, grpc=True), client=partial(_plain_grpc, unseen=True)),
    ),
    "nginx": (
        "each of three servers behind nginx is stopped, drains and starts again: no HTTP call fails",
        partial(_behind_one_address, balanced=_nginx, client=_http, pauses=(0.0, 0.0, 0.0, IDLE)),
    ),
    "http": (
        "the same without a proxy, for clients that keep connections and try another server only when one is refused",
        partial(_behind_one_address, balanced=_direct, client=_http, pauses=(0.0, 0.0, 0.0, IDLE)),
    ),
}
_SECURED = {
    f"{name}-tls": (f"{_PLAIN[name][0]}, with TLS to the proxy and to the servers", partial(_PLAIN[name][1], tls=True))
    for name in ("haproxy", "nginx-grpc", "nginx")
}
CASES: Mapping[str, tuple[str, Callable[..., Json]]] = {**_PLAIN, **_SECURED}

if __name__ == "__main__":
    sys.exit(main())
