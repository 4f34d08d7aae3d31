"""How many processes a server has, how they talk to their parent, and how their metrics are written."""

import asyncio
import mmap
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics

from prelunet.evaluator.answer import Timings
from prelunet.evaluator.engine.load import MAX_LANES_BYTES
from prelunet.evaluator.engine.session import Placement
from prelunet.evaluator.errors import EnvironmentFault, ModelNotFound, UsageError
from prelunet.evaluator.serving.http.listener import bind
from prelunet.evaluator.serving.observability.metrics import Metrics, ModelMetrics
from prelunet.evaluator.serving.options import HttpOptions, ModelFile, ServeOptions
from prelunet.evaluator.serving.processes import parent
from prelunet.evaluator.serving.processes.link import Link
from prelunet.evaluator.serving.processes.parent import choose_processes, file_in_memory, held_ports
from prelunet.evaluator.serving.scheduling.shared_cores import SharedCores
from tests.serving.event_loop import async_test


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    file = tmp_path / "small.onnx"
    file.write_bytes(bytes(9))
    return ModelFile("small", file)


@pytest.mark.parametrize(("number", "processes"), [(1, 1), (4, 1), (7, 1), (8, 2), (16, 4), (33, 8), (192, 8)])
def test_by_default_a_small_net_gets_a_process_for_every_four_cores(
    model: ModelFile, number: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "cores", lambda: number)
    assert choose_processes(ServeOptions((model,))) == processes
    assert choose_processes(ServeOptions((model,), processes=3)) == 3


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ({"placement": Placement("cuda")}, 1),
        ({"placement": Placement("openvino")}, 1),
        ({"placement": Placement(precision="bf16")}, 1),
        ({"placement": Placement("cpu")}, 4),
        ({"placement": Placement(memory=6 * 2**30)}, 3),
        ({"placement": Placement(memory=2**30)}, 1),
        ({"unix_socket": Path("a.sock")}, 1),
        ({"http": HttpOptions(unix_socket=Path("a.sock"))}, 1),
    ],
)
def test_by_default_a_server_has_one_process_where_others_would_not_help(
    model: ModelFile, options: dict[str, Any], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "cores", lambda: 16)
    assert choose_processes(ServeOptions((model,), **options)) == processes


@pytest.mark.parametrize("where", ["given", "in the folder"])
def test_by_default_one_process_serves_a_large_net(
    model: ModelFile, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "cores", lambda: 16)
    large = tmp_path / "models" / "large" / "1" / "model.onnx"
    large.parent.mkdir(parents=True)
    with large.open("wb") as file:
        file.truncate(MAX_LANES_BYTES + 1)
    given = (model, ModelFile("large", large)) if where == "given" else (model,)
    folder = None if where == "given" else tmp_path / "models"
    assert choose_processes(ServeOptions(given, folder)) == 1


def test_several_processes_cannot_share_a_unix_socket(model: ModelFile) -> None:
    with pytest.raises(UsageError, match="--processes 2: a Unix socket belongs to one process"):
        choose_processes(ServeOptions((model,), processes=2, unix_socket=Path("a.sock")))


@pytest.mark.parametrize("lacking", [False, True])
def test_the_memory_that_processes_share_also_exists_where_python_lacks_that_of_linux(
    monkeypatch: pytest.MonkeyPatch, lacking: bool
) -> None:
    if lacking:
        monkeypatch.delattr("os.memfd_create")
    with file_in_memory(3) as file, mmap.mmap(file.fileno(), 0) as memory:
        SharedCores(memory, 2).note(2)
        assert memory[:] == b"\0\2\0"
        assert file.read() == b"\0\2\0", "another process sees it"


def test_several_processes_need_linux(model: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(UsageError, match="--processes 2: only on Linux"):
        choose_processes(ServeOptions((model,), processes=2))


def test_ports_are_taken_before_any_process_listens_and_only_its_own_processes_share_them(model: ModelFile) -> None:
    options = ServeOptions((model,), port=0, metrics_port=0)
    with held_ports(options) as held:
        assert len({held.port, held.metrics_port, 0}) == 3
        with pytest.raises(EnvironmentFault, match=f"port {held.port} is in use"), held_ports(held):
            pass
        with pytest.raises(OSError, match="in use"):
            bind(held.host, held.port)
        for _ in range(2):  # two processes
            (listening,) = bind(held.host, held.port, shared=True)
            listening.listen()
            listening.close()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, Link, "asyncio.Task[None]"]]:
    """Yield two ends, of which the second has handlers, and the task that runs it."""
    ours, theirs = socket.socketpair()

    async def double(number: int) -> int:
        return 2 * number

    async def refuse(name: str) -> None:
        raise ModelNotFound(f"no model '{name}' is served")

    handlers = {"double": double, "refuse": refuse, "wait": asyncio.Event().wait}
    near, far = Link({}), Link(handlers)
    await near.open(ours)
    await far.open(theirs)
    tasks = [asyncio.create_task(near.run()), asyncio.create_task(far.run())]
    try:
        yield near, far, tasks[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@async_test
async def test_calls_to_the_other_end_return_its_results_and_raise_its_errors() -> None:
    async with linked() as (near, _, _):
        waiting = asyncio.create_task(near.call("wait"))
        assert await asyncio.gather(*(near.call("double", number) for number in (3, 2**40))) == [6, 2**41]
        with pytest.raises(ModelNotFound, match="no model 'x' is served"):
            await near.call("refuse", "x")
        with pytest.raises(RuntimeError, match="KeyError: 'unknown'"):
            await near.call("unknown")
        assert not waiting.done(), "one call should not wait for another"


@async_test
async def test_a_call_that_waits_for_an_end_that_is_closed_fails_as_later_ones_do() -> None:
    async with linked() as (near, _, running):
        waiting = asyncio.create_task(near.call("wait"))
        await near.call("double", 1)
        running.cancel()
        for call in (waiting, near.call("double", 1)):
            with pytest.raises(ConnectionError, match="has ended"):
                await call


def test_metrics_of_several_processes_keep_their_samples_apart_with_exemplars() -> None:
    both = {}
    for number, seconds in ((2, 0.02), (1, 0.1)):
        metrics = Metrics()
        ModelMetrics(metrics, "m").answered(Timings(0, 0, 0, seconds, 1), 0.0, {"trace_id": f"{number}"})
        both[number] = metrics.collect()
    text, media_type = Metrics().text("application/openmetrics-text; version=1.0.0", both)
    assert media_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(text.decode())}
    samples = families["prelunet_request_seconds"].samples
    sums = {each.labels["process"]: each.value for each in samples if each.name.endswith("_sum")}
    assert sums == {"1": 0.1, "2": 0.02}
    exemplars = {each.labels["process"]: each.exemplar.labels for each in samples if each.exemplar}
    assert exemplars == {"1": {"trace_id": "1"}, "2": {"trace_id": "2"}}
