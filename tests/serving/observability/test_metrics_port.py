"""Prometheus metrics over HTTP, and the responses to other requests."""

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from prelunet.evaluator.answer import Timings
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.serving.http.listener import ConnectionLimits, Listener
from prelunet.evaluator.serving.http.metrics import METRICS_CLOSE_TIMEOUT, METRICS_LIMITS, metrics_app
from prelunet.evaluator.serving.observability.metrics import Metrics, ModelMetrics
from tests.serving.event_loop import async_test, until

SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def running_metrics_server(
    text: Callable[[], bytes] = lambda: b"",
    timeout: float = 600.0,
    host: str = "127.0.0.1",
    ready: Callable[[], bool] = lambda: True,
    count: int = METRICS_LIMITS.count,
) -> AsyncIterator[Listener]:
    port = listener(text, timeout, host, ready, count)
    port.open()
    try:
        yield port
    finally:
        await port.close_within(METRICS_CLOSE_TIMEOUT)


def listener(
    text: Callable[[], bytes],
    timeout: float = 600.0,
    host: str = "127.0.0.1",
    ready: Callable[[], bool] = lambda: True,
    count: int = METRICS_LIMITS.count,
    number: int = 0,
) -> Listener:
    limits = ConnectionLimits(count, METRICS_LIMITS.head_bytes, timeout, timeout)
    return Listener(
        metrics_app(lambda _: (text(), "text/plain"), ready, timeout), host, number, limits, option="--metrics-port"
    )


async def answer_to(request: bytes, port: Listener, host: str = "127.0.0.1") -> tuple[int, str]:
    """Return status and body of a response."""
    reader, writer = await asyncio.open_connection(host, int(port.address.rpartition(":")[2]))
    writer.write(request)
    answer = (await asyncio.wait_for(reader.read(), 20)).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    length = re.search(r"content-length: (\d+)", head)
    assert length is not None
    assert int(length[1]) == len(body.encode())
    return int(head.split(" ")[1]), body


@async_test
async def test_a_scrape_returns_the_metrics() -> None:
    metrics = Metrics()
    ModelMetrics(metrics, "flowers").refused["views"].inc()
    async with running_metrics_server(lambda: metrics.text()[0]) as port:
        status, body = await answer_to(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", port)
        samples = {
            (sample.name, sample.labels.get("model"), sample.labels.get("reason")): sample.value
            for family in text_string_to_metric_families(body)
            for sample in family.samples
        }
        assert status == 200
        assert samples["prelunet_refusals_total", "flowers", "views"] == 1
        assert samples["prelunet_waiting_images", "flowers", None] == 0
        again = await answer_to(b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", port)
        assert again[0] == 200


PROMETHEUS_ACCEPTS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"


@pytest.mark.parametrize(
    ("accept", "media_type", "parse"),
    [
        (PROMETHEUS_ACCEPTS, "application/openmetrics-text; version=1.0.0", openmetrics.text_string_to_metric_families),
        ("text/plain", "text/plain; version=0.0.4", text_string_to_metric_families),
        ("", "text/plain; version=0.0.4", text_string_to_metric_families),
    ],
)
@async_test
async def test_a_scrape_gets_openmetrics_if_it_accepts_that(accept: str, media_type: str, parse: Any) -> None:
    metrics = Metrics()
    ModelMetrics(metrics, "flowers").answered(Timings(0.0, 0.1, 0.1, 0.2, 1), 0.001, {"trace_id": "abc"})
    app = metrics_app(metrics.text, lambda: True)
    port = Listener(app, "127.0.0.1", 0, METRICS_LIMITS, option="--metrics-port")
    port.open()
    headers = {"Accept": accept} if accept else {}
    response = await asyncio.to_thread(httpx.get, f"http://{port.address}/metrics", headers=headers, trust_env=False)
    await port.close_within(METRICS_CLOSE_TIMEOUT)
    assert response.headers["content-type"].startswith(media_type)
    samples = [sample for family in parse(response.text) for sample in family.samples]
    assert [each.labels["le"] for each in samples if each.exemplar] == ["0.25"] * ("openmetrics" in media_type)
    assert any(each.name == "prelunet_request_seconds_count" and each.value == 1 for each in samples)


@async_test
async def test_a_probe_learns_whether_the_server_accepts_calls() -> None:
    serving = [False]
    async with running_metrics_server(ready=lambda: serving[0]) as port:
        assert await answer_to(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n", port) == (503, "not ready\n")
        assert await answer_to(b"GET /liveness HTTP/1.1\r\nHost: x\r\n\r\n", port) == (200, "live\n")
        serving[0] = True
        assert await answer_to(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n", port) == (200, "ready\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /metrics/../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"POST /ready HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"\x00\xff\r\n\r\n", 400),
    ],
)
@async_test
async def test_other_paths_and_methods_are_refused(request_: bytes, status: int) -> None:
    async with running_metrics_server() as port:
        assert (await answer_to(request_, port))[0] == status


@async_test
async def test_a_client_that_sends_too_much_or_too_slowly_is_cut_off() -> None:
    async with running_metrics_server(timeout=0.2) as port:
        long_head = b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 2 * METRICS_LIMITS.head_bytes
        assert (await answer_to(long_head, port))[0] == 400
        host, _, number = port.address.rpartition(":")
        for sent in (b"GET /met", b""):
            reader, writer = await asyncio.open_connection(host, int(number))
            writer.write(sent)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), 20)
            writer.close()
        assert (await answer_to(SCRAPE, port))[0] == 200


@async_test
async def test_at_the_connection_limit_the_oldest_incomplete_request_makes_room() -> None:
    async with running_metrics_server() as port:
        number = int(port.address.rpartition(":")[2])
        slow = []
        for opened in range(METRICS_LIMITS.count + 3):
            if opened >= METRICS_LIMITS.count:
                assert (await answer_to(SCRAPE, port))[0] == 200
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await asyncio.wait_for(slow.pop(0)[0].readexactly(1), 20)
                await until(lambda: port.connections == METRICS_LIMITS.count - 1)  # the scrape has left
            slow.append(await asyncio.open_connection("127.0.0.1", number))
            slow[-1][1].write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: ")
            await until(lambda: port.connections == len(slow))
        for reader, writer in slow:
            writer.write(b"\r\n\r\n")
            assert await asyncio.wait_for(reader.readline(), 20) == b"HTTP/1.1 200 OK\r\n", (
                "younger ones should not mind"
            )
            writer.close()


@async_test
async def test_at_the_connection_limit_the_oldest_unread_response_makes_room() -> None:
    texts = [b"x" * 2**24, b"x" * 2**24, b"in time"]  # more than a connection's buffers
    async with running_metrics_server(lambda: texts.pop(0), count=2) as port:
        lazy = []
        for _ in range(2):
            lazy.append(socket.create_connection(("127.0.0.1", int(port.address.rpartition(":")[2]))))
            lazy[-1].sendall(SCRAPE)
            assert await asyncio.to_thread(lazy[-1].recv, 1) == b"H"
        assert await answer_to(SCRAPE, port) == (200, "in time")
        await until(lambda: port.connections == 1)
    for client in lazy:
        client.close()


@async_test
async def test_an_unread_response_is_freed_after_the_timeout() -> None:
    async with running_metrics_server(lambda: b"x" * 2**24, timeout=0.3) as port:
        with socket.create_connection(("127.0.0.1", int(port.address.rpartition(":")[2]))) as client:
            client.sendall(SCRAPE)
            assert await asyncio.to_thread(client.recv, 1) == b"H"
            await until(lambda: not port.connections)


@async_test
async def test_a_request_being_answered_does_not_make_room_for_another() -> None:
    go_on, entered = threading.Event(), []

    def slowly() -> bytes:
        entered.append(1)
        assert go_on.wait(30)
        return b"all of it"

    async with running_metrics_server(slowly, count=2) as port:
        scrapes = [asyncio.create_task(answer_to(SCRAPE, port)) for _ in range(2)]
        await until(lambda: len(entered) == 2)
        with pytest.raises((ConnectionError, AssertionError)):  # no answer
            await answer_to(SCRAPE, port)
        go_on.set()
        assert await asyncio.gather(*scrapes) == [(200, "all of it")] * 2


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@async_test
async def test_the_ipv6_wildcard_listens_on_ipv4_too() -> None:
    async with running_metrics_server(host="::") as port:
        assert port.address.startswith("[::]:")
        for host in ("127.0.0.1", "::1"):
            assert (await answer_to(SCRAPE, port, host))[0] == 200
        number = int(port.address.rpartition(":")[2])
        with pytest.raises(EnvironmentFault, match=rf"--metrics-port\): port {number} is in use\."):
            listener(lambda: b"", host="::", number=number)


@async_test
async def test_a_scrape_in_progress_when_the_port_closes_gets_its_response() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slowly() -> bytes:
        entered.set()
        assert go_on.wait(30)
        return b"all of it"

    port = listener(slowly)
    port.open()
    scrape = asyncio.create_task(answer_to(SCRAPE, port))
    assert await asyncio.to_thread(entered.wait, 30)
    closing = asyncio.create_task(port.close_within(METRICS_CLOSE_TIMEOUT))
    await asyncio.sleep(0)  # it has begun
    go_on.set()
    assert await scrape == (200, "all of it")
    await closing


@async_test
async def test_closing_does_not_wait_for_a_scrape_that_hangs() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hanging() -> bytes:
        entered.set()
        assert go_on.wait(30)
        return b""

    port = listener(hanging)
    port.open()
    scrape = asyncio.create_task(answer_to(SCRAPE, port))
    assert await asyncio.to_thread(entered.wait, 30)
    closing = asyncio.create_task(port.close_within(0.3))
    with pytest.raises((ConnectionError, AssertionError)):  # no answer
        await scrape
    go_on.set()
    await closing


@async_test
async def test_closing_aborts_open_connections_and_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_metrics_server() as port:
        host, _, number = port.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        while not port.connections:
            await asyncio.sleep(0.005)
        await port.close_within(METRICS_CLOSE_TIMEOUT)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 20)
        writer.close()
        assert port.connections == 0
    assert caplog.records == []


@async_test
async def test_a_metrics_port_in_use_is_reported_with_a_fix() -> None:
    async with running_metrics_server() as port:
        number = int(port.address.rpartition(":")[2])
        with pytest.raises(EnvironmentFault, match=rf"port {number} is in use\. .* --metrics-port"):
            listener(lambda: b"", number=number)


def test_docs_list_every_metric_with_its_labels() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    listed = {
        (name, tuple(re.findall(r"\w+", labels)))
        for name, labels in re.findall(r"^\| `(prelunet_\w+)(?:\{([^}]*)\})?` \|", page, re.MULTILINE)
    }
    counted = set()
    for instrument in vars(Metrics()).values():
        if hasattr(instrument, "_labelnames"):
            suffix = "_total" if instrument._type == "counter" else ""
            counted.add((instrument._name + suffix, tuple(instrument._labelnames)))
    assert listed == counted
