"""Prometheus' metrics over HTTP, and what a stranger gets there."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from evaluator.errors import EnvironmentFault
from evaluator.serving.exposition import MAX_CONNECTIONS, MAX_REQUEST, Exposition
from evaluator.serving.metrics import Metrics
from fakes import FakeSession
from in_a_loop import in_a_loop


@asynccontextmanager
async def exposed(metrics: Metrics, patience: float = 30.0) -> AsyncIterator[Exposition]:
    port = Exposition(metrics.text, patience=patience)
    await port.open("127.0.0.1", 0)
    try:
        yield port
    finally:
        await port.close()


async def answer_to(request: bytes, port: Exposition) -> tuple[int, str]:
    """Return status and body of an answer."""
    host, _, number = port.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    writer.write(request)
    answer = (await asyncio.wait_for(reader.read(), 20)).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    length = re.search(r"Content-Length: (\d+)", head)
    assert length is not None
    assert int(length[1]) == len(body.encode())
    return int(head.split(" ")[1]), body


@in_a_loop
async def test_a_scrape_gives_what_is_counted() -> None:
    metrics = Metrics()
    metrics.of_model("flowers", FakeSession()).refused("views")  # type: ignore[arg-type]
    async with exposed(metrics) as port:
        status, body = await answer_to(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", port)
        found = {
            (sample.name, sample.labels.get("model"), sample.labels.get("reason")): sample.value
            for family in text_string_to_metric_families(body)
            for sample in family.samples
        }
        assert status == 200
        assert found["prelunet_refusals_total", "flowers", "views"] == 1
        assert found["prelunet_model_info", "flowers", None] == 1
        again = await answer_to(b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", port)
        assert again[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405),
        (b"\x00\xff\r\n\r\n", 404),
    ],
)
@in_a_loop
async def test_there_is_nothing_but_the_metrics(request_: bytes, status: int) -> None:
    async with exposed(Metrics()) as port:
        assert (await answer_to(request_, port))[0] == status


@in_a_loop
async def test_a_client_that_sends_too_much_or_too_slowly_is_cut_off() -> None:
    async with exposed(Metrics(), patience=0.2) as port:
        host, _, number = port.address.rpartition(":")
        for sent in (b"GET /metrics HTTP/1.1\r\n" + b"x" * 2 * MAX_REQUEST, b"GET /met", b""):
            reader, writer = await asyncio.open_connection(host, int(number))
            writer.write(sent)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), 20)
            writer.close()
        assert (await answer_to(b"GET /metrics HTTP/1.1\r\n\r\n", port))[0] == 200


@in_a_loop
async def test_clients_that_wait_in_silence_are_bounded_and_a_scrape_has_its_turn_after_them() -> None:
    async with exposed(Metrics()) as port:
        host, _, number = port.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(number)) for _ in range(MAX_CONNECTIONS)]
        reader, writer = await asyncio.open_connection(host, int(number))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 20)
        writer.close()
        for _, writer in silent:
            writer.close()
        while port.connections:
            await asyncio.sleep(0.005)
        assert (await answer_to(b"GET /metrics HTTP/1.1\r\n\r\n", port))[0] == 200


@in_a_loop
async def test_who_is_still_there_at_the_end_is_cut_off_and_nothing_is_left_or_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with exposed(Metrics()) as port:
        host, _, number = port.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        while not port.connections:
            await asyncio.sleep(0.005)
        await port.close()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 20)
        writer.close()
        assert port.connections == 0
    assert caplog.records == []


@in_a_loop
async def test_a_port_in_use_is_told_with_a_mend() -> None:
    async with exposed(Metrics()) as port:
        number = int(port.address.rpartition(":")[2])
        with pytest.raises(EnvironmentFault, match=rf"127\.0\.0\.1:{number} for metrics .* --metrics-port"):
            await Exposition(Metrics().text).open("127.0.0.1", number)


def test_docs_list_every_metric_with_its_labels() -> None:
    page = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    listed = {
        (name, tuple(re.findall(r"\w+", labels)))
        for name, labels in re.findall(r"^\| `(prelunet_\w+)`(?: \{([^}]*)\})? \|", page, re.MULTILINE)
    }
    counted = set()
    for instrument in vars(Metrics()).values():
        if hasattr(instrument, "_labelnames"):
            suffix = "_total" if instrument._type == "counter" else ""
            counted.add((instrument._name + suffix, tuple(instrument._labelnames)))
    assert listed == counted
