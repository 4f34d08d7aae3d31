"""The memory that a server states in its start line: kept under load, and fitted to `--memory-limit`."""

import io
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.engine.memory import MemoryEstimate
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.decode_memory import decode_semaphore, limit_decoding
from prelunet.evaluator.machine import parse_memory
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.memory import fit_limits, serving_memory
from prelunet.evaluator.serving.options import ModelFile, QueueOptions, ServeOptions, ServerLimits
from prelunet.evaluator.serving.processes.parent import part_of
from prelunet.evaluator.serving.scheduling.admission import with_reserve
from tests.helpers.fakes import FakeSession
from tests.serving.test_serving_process import run, serving

OPTIONS = ServeOptions((ModelFile("a", Path("a.onnx")),))
CLIENTS = 6  # more than decode at once


def session(mb: int = 2, *, threads: int = 1) -> Any:
    """Return a session; with several threads it has lanes if its file is small beside the limit."""
    fake = FakeSession()
    fake.model_bytes, fake.placement = mb * 2**20, replace(fake.placement, threads=threads)
    return fake


def needed(*sessions: Any, limit: str | None = None, **options: Any) -> MemoryEstimate:
    placement = replace(OPTIONS.placement, memory=parse_memory(limit))
    return serving_memory(sessions, replace(OPTIONS, placement=placement, **options))


def photos() -> list[bytes]:
    """Return a JPEG of 3 megapixels, and a WebP of 4, which takes the most to decode."""
    encoded = []
    for width, height, kind in ((2048, 1536, "JPEG"), (2400, 1800, "WEBP")):
        noise = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).resize((width, height)).save(file, kind, method=0)
        encoded.append(file.getvalue())
    return encoded


def peak_memory(pid: int) -> int:
    """Return the sum of the most bytes that a process and each of its children ever had in memory."""
    lists = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    status = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(status[0]) + sum(peak_memory(int(child)) for text in lists for child in text.split())


def test_the_smallest_limit_for_a_small_model_holds_under_a_burst_of_photos(exported: dict[str, Any]) -> None:
    model = exported["demo-channel"].path
    refused = run("--model", f"x={model}", "--port", "0", "--device", "cpu", "--memory-limit", "200M")
    assert (refused.returncode, refused.stdout) == (2, "")
    found = re.search(r"--memory-limit 200M: serving needs at least (\S+) .*--queue-bytes", refused.stderr)
    assert found is not None, refused.stderr
    smallest = parse_memory(found[1])
    assert smallest is not None
    assert smallest <= 800 * 2**20
    images = photos()

    def burst(address: str) -> None:
        with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = pb_grpc.PreluNetServiceStub(channel)
            for image in images:
                stub.Classify(pb.ClassifyRequest(image=image), timeout=60)
            stub.Classify(pb.ClassifyRequest(image=images[0], protocol="dense-80"), timeout=60)
            with pytest.raises(grpc.RpcError, match="more than this server's limit"):
                stub.Classify(pb.ClassifyRequest(image=images[0], protocol="dense-1024"), timeout=60)

    with serving(model, "--memory-limit", found[1]) as (process, line, address):
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(burst, [address] * CLIENTS))
        peak = peak_memory(process.pid)
    stated = re.search(r"memory at most (\S+)", line)
    assert stated is not None
    assert peak <= (parse_memory(stated[1]) or 0) <= smallest
    assert smallest <= 3 * peak, "a limit far above what the server takes"


@pytest.mark.parametrize("models", [1, 2, 5])
@pytest.mark.parametrize("mb", [2, 20, 200])
def test_the_limit_that_a_refusal_names_is_enough_and_no_lower_one(models: int, mb: int) -> None:
    sessions = [session(mb, threads=2)] * models
    with pytest.raises(UsageError) as refused:
        needed(*sessions, limit="100M")
    found = re.search(r"--memory-limit 100M: serving needs at least (\S+) \(models .*\)\. Give", str(refused.value))
    assert found is not None, refused.value
    enough = parse_memory(found[1])
    assert enough is not None
    assert needed(*sessions, limit=found[1]).total <= enough
    with pytest.raises(UsageError):
        needed(*sessions, limit=f"{0.99 * enough / 2**20:.2f}M")


def test_the_limit_that_a_refusal_names_is_that_of_all_processes() -> None:
    def need(limit: int) -> int:
        options = replace(OPTIONS, placement=replace(OPTIONS.placement, memory=limit))
        return 2 * serving_memory([session()], part_of(options, 2)).total

    with pytest.raises(UsageError) as refused:
        need(900 * 2**20)
    found = re.search(r"^--memory-limit 900M: .* in each of 2 processes\. Give (\S+), ", str(refused.value))
    assert found is not None, refused.value
    enough = parse_memory(found[1]) or 0
    assert need(enough) <= enough


def test_each_model_adds_its_weights_batch_and_queue_and_nothing_twice() -> None:
    one, two = needed(session()), needed(session(), session(50))
    assert two.parts["models"] - one.parts["models"] == 1.5 * 50 * 2**20, "kept by onnxruntime"
    assert two.parts["batches"] - one.parts["batches"] < one.parts["batches"] - OPTIONS.queue.ready_bytes
    assert two.parts["decoding"] == one.parts["decoding"]
    assert two.parts["messages"] - one.parts["messages"] == 2 * 1.25 * OPTIONS.queue.max_bytes
    assert needed(session(4000)).total < needed(session(4000), session()).total, "also where loading takes most"


def test_lanes_take_a_second_copy_of_the_weights_and_of_the_batch() -> None:
    one, two = needed(session(50)), needed(session(50, threads=2))
    assert two.parts["models"] - one.parts["models"] == two.loading - one.loading == 1.5 * 50 * 2**20
    assert two.parts["batches"] > one.parts["batches"]


def test_the_limits_of_a_server_grow_with_its_memory_up_to_those_without_a_limit() -> None:
    small, large = (fit_limits(OPTIONS, memory) for memory in (2**30, 2**40))
    assert with_reserve(small.queue.max_bytes) >= small.limits.image.max_bytes - 1, "the largest image has room"
    for name in ("max_bytes", "ready_bytes"):
        assert getattr(small.queue, name) < getattr(large.queue, name) == getattr(OPTIONS.queue, name)
    for name in ("max_arriving_bytes", "unread_bytes"):
        assert getattr(small.limits, name) < getattr(large.limits, name) == getattr(OPTIONS.limits, name)
    usual = decode_semaphore(gpu=False).capacity
    try:
        limit_decoding(2**30)
        assert decode_semaphore(gpu=False).capacity < usual
    finally:
        limit_decoding(None)
    assert decode_semaphore(gpu=False).capacity == usual


def test_options_that_the_user_gives_are_kept_or_refused_with_the_memory_that_they_need() -> None:
    given = {"queue": QueueOptions(queue_bytes=2**28), "limits": ServerLimits(arriving_bytes=2**28)}
    fitted = fit_limits(replace(OPTIONS, **given), 2**30)
    assert (fitted.queue.max_bytes, fitted.limits.max_arriving_bytes) == (2**28, 2**28)
    for name, option in given.items():
        with pytest.raises(UsageError, match=r"needs at least \S+ .*a smaller --queue-bytes, --arriving-bytes"):
            needed(session(), limit="700M", **{name: option})
    assert needed(session(), limit="2G", **given).total > needed(session(), limit="2G").total
