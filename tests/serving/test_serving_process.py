"""`prelunet serve` as a process: its output, how it ends, and its exit codes."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prelunet.evaluator.client import Client
from prelunet.evaluator.errors import DeviceLost, EnvironmentFault, ImageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.lifecycle import SIGNAL_DEBOUNCE
from tests.serving.serving_harness import png

PRELUNET = [sys.executable, "-c", "from prelunet.evaluator.cli import main; main()"]
LOSING = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from prelunet.evaluator.cli import main
from prelunet.evaluator.errors import DeviceLost
from prelunet.evaluator.serving import models
from tests.helpers.fakes import FakeSession

class Losing(FakeSession):
    def compute(self, staged):
        if staged[0].shape[2] == 99:
            raise DeviceLost("the GPU of /secret/place is gone")
        return super().compute(staged)

models.open_with_placement = lambda *_, **__: Losing()
main()
"""  # a program whose device is lost at an image of width 99
HANGING = LOSING.replace('raise DeviceLost("the GPU of /secret/place is gone")', "threading.Event().wait()").replace(
    "main()\n",
    "from prelunet.evaluator.serving import lifecycle\nfrom prelunet.evaluator.serving.scheduling import watchdog\n"
    "import threading\n"
    "watchdog.FIRST_BATCH_TIMEOUT = watchdog.MIN_TIMEOUT = 1.0\n"
    "watchdog.CHECK_INTERVAL = 0.1; lifecycle.CLOSE_TIMEOUT = 0.2\n"
    "main()\n",
)  # a program whose device hangs there instead
IMAGE = png(40, 57)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def model(exported) -> Path:
    return exported["demo-channel"].path


@contextmanager
def serving(
    model: Path, *options: str, program: list[str] = PRELUNET
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run `prelunet serve` on a free port; yields the process, the start line and the address."""
    command = [*program, "serve", "--model", f"telling={model}", "--device", "cpu", "--port", "0", "--processes", "1"]
    command += options
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"\d+\.\d+\.\d+\.\d+:\d+", line)
        assert address is not None, f"{line}{process.communicate(timeout=30)}"
        yield process, line, address[0]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[tuple[str, str]]:
    """Run a server with metrics, and limits on images that IMAGE reaches; yields the start line and the address."""
    limits = ["--max-image-bytes", str(len(IMAGE)), "--max-image-pixels", str(40 * 57)]
    with serving(model, "--metrics-port", "0", *limits) as (_, line, address):
        yield line, address


class Sender:
    """The messages of an evaluation, sent one by one."""

    def __init__(self) -> None:
        self._queue: queue.Queue[pb.EvaluateRequest | None] = queue.Queue()
        self._queue.put(pb.EvaluateRequest(start=pb.EvaluateStart(dataset="photos", protocol="center")))

    def __iter__(self) -> Iterator[pb.EvaluateRequest]:
        return iter(self._queue.get, None)

    def image(self, name: str) -> None:
        self._queue.put(pb.EvaluateRequest(image=pb.LabelledImage(file=name, data=png(40, 57), label=3)))

    def end(self) -> None:
        self._queue.put(None)


def begin_evaluation(channel: grpc.Channel, sender: Sender) -> grpc.Call:
    """Start an evaluation and return when it has reached the server."""
    stub = pb_grpc.PreluNetServiceStub(channel)
    call = stub.Evaluate(iter(sender), timeout=60)
    stub.Classify(pb.ClassifyRequest(image=png(40, 57)))  # on the same connection, so it arrives later
    return call


def test_the_start_line_has_address_models_provider_precision_and_versions(model: Path) -> None:
    with serving(model, "--model", f"second={model}", "--lame-duck", "0") as (process, line, address):
        for part in (r"telling \(demo, 23 classes", r"second \(", "CPUExecutionProvider", "fp32", "onnxruntime \\d"):
            assert re.search(part, line), line
        with Client(address) as client:
            assert [served.name for served in client.models()] == ["telling", "second"]
            assert client.classify(png(40, 57), model="second").circumstances["provider"] == "CPUExecutionProvider"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


class Load:
    """Threads that make one call after another. answers: one entry per answer; failures: errors of failed calls."""

    def __init__(self, address: str, threads: int) -> None:
        self.answers: list[int] = []
        self.failures: list[Exception] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(address, n)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, address: str, number: int) -> None:
        with Client(address, retries=False) as client:
            while not self._stop.is_set():
                try:
                    client.classify(png(40 + number, 57), protocol="center")
                    self.answers.append(number)
                except Exception as error:
                    self.failures.append(error)
                    return

    def go_on(self, calls: int) -> None:
        """Wait for this many more answers, or for a failure."""
        target = len(self.answers) + calls
        while len(self.answers) < target and not self.failures:
            threading.Event().wait(0.01)

    def until_it_fails(self) -> None:
        """Raise the first failure."""
        for thread in self._threads:
            thread.join()
        raise self.failures[0]

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_sigterm_under_load_loses_no_call(model: Path) -> None:
    with serving(model, "--lame-duck", "60") as (process, _, address), grpc.insecure_channel(address) as channel:
        sender, watched = Sender(), health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watched).status == SERVING
        load = Load(address, threads=4)
        load.go_on(20)
        process.send_signal(signal.SIGTERM)
        assert next(watched).status == NOT_SERVING
        load.go_on(20)  # in the window
        in_flight = begin_evaluation(channel, sender)
        sender.image("a")
        load.end()
        assert load.failures == []
        time.sleep(2 * SIGNAL_DEBOUNCE)
        process.send_signal(signal.SIGTERM)  # enough of the window
        with pytest.raises(EnvironmentFault):
            Load(address, threads=1).until_it_fails()
        sender.image("b")
        sender.end()
        assert [*in_flight][-1].report.evaluated == 2
        output, log = process.communicate(timeout=20)  # the open health stream does not delay it
        assert process.returncode == 0, log
        assert "no call was lost" in output
        assert "Traceback" not in log


def test_a_server_with_closed_output_streams_serves_and_keeps_its_exit_codes(model: Path) -> None:
    """The reader of a pipe may end before the server: `serve | head -1` in a script, a log collector that crashed."""
    with serving(model, "--lame-duck", "0", program=[sys.executable, "-c", LOSING]) as (process, _, address):
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        with Client(address, retries=False) as client:
            client.classify(png(40, 57))
            with pytest.raises(DeviceLost):
                client.classify(png(40, 99), protocol="dense-40")
        assert process.wait(30) == 5
        process.stdout = process.stderr = None  # the end of the block would read them
    command = [*PRELUNET, "serve", "--model", f"telling={model}", "--device", "cpu", "--port", "0", "--lame-duck", "0"]
    reading, writing = os.pipe()
    os.close(reading)
    deaf = subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert deaf.stderr is not None
    line = next(line for line in deaf.stderr if "could not be written" in line)
    address = re.search(r"serving on (\S+):\d+:", line)
    assert address is not None, line
    deaf.send_signal(signal.SIGTERM)
    deaf.communicate(timeout=30)
    assert deaf.returncode == 0


def test_a_lost_device_exits_5_after_its_calls_have_failed(model: Path) -> None:
    losing = [sys.executable, "-c", LOSING]
    with serving(model, program=losing) as (process, _, address), Client(address, retries=False) as client:
        assert client.classify(png(40, 57)).predictions
        with pytest.raises(DeviceLost) as caught:
            client.classify(png(40, 99), protocol="dense-40")
        assert "secret" not in str(caught.value)
        output, log = process.communicate(timeout=30)
        assert process.returncode == 5, log
        assert "prelunet: the GPU of /secret/place is gone" in log.splitlines()[-1]
        assert output == ""


def test_a_hanging_device_exits_5_although_its_thread_never_ends(model: Path) -> None:
    hanging = [sys.executable, "-c", HANGING]
    with (
        serving(model, program=hanging) as (process, _, address),
        Client(address, retries=False) as client,
    ):
        with pytest.raises(DeviceLost):
            client.classify(png(40, 99), protocol="dense-40")
        _, log = process.communicate(timeout=30)
        assert process.returncode == 5, log
        assert "CPUExecutionProvider has been computing one batch for" in log.splitlines()[-1]


def test_metrics_are_served_on_their_own_port(running: tuple[str, str]) -> None:
    line, address = running
    with Client(address) as client:
        client.classify(IMAGE)
    place = re.search(r"metrics on (127\.0\.0\.1:\d+)", line)
    assert place is not None, line
    with urllib.request.urlopen(f"http://{place[1]}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    for part in (r'prelunet_model_info\{.*model="telling".*\} 1', "process_resident_memory_bytes"):
        assert re.search(part, text), text


def test_log_lines_are_json_if_requested(model: Path) -> None:
    with serving(model, "--log-format", "json", "--lame-duck", "0", "--host", "0.0.0.0", "--insecure") as (
        process,
        _,
        _,
    ):
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    lines = [json.loads(line) for line in log.splitlines()]
    messages = " ".join(line["message"] for line in lines)
    for part in (
        "listening on 0.0.0.0 without TLS", "loading model telling, 1 of 1", "memory: at most", "SIGTERM",
        "model telling/1 is loaded: sha256", "architecture demo, CPUExecutionProvider, fp32",
    ):  # fmt: skip
        assert part in messages
    by_message = {line["message"]: line for line in lines}
    assert by_message["serving"]["memory"] > 2**28
    assert lines[-1]["message"] == "stopped"
    assert lines[-1]["unfinished"] == 0


def test_a_call_that_exceeds_the_grace_period_is_cut_off(model: Path) -> None:
    with (
        serving(model, "--grace", "0.3", "--lame-duck", "0") as (process, _, address),
        grpc.insecure_channel(address) as channel,
    ):
        sender = Sender()
        in_flight = begin_evaluation(channel, sender)
        process.send_signal(signal.SIGTERM)
        output, log = process.communicate(timeout=20)
        assert process.returncode == 0, log
        assert "calls cut off: 1" in output
        assert in_flight.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
        sender.end()


def test_a_port_in_use_exits_5_and_the_first_server_keeps_serving(model: Path, running: tuple[str, str]) -> None:
    _, address = running
    with Client(address) as client:
        port = address.rpartition(":")[2]
        second = run("--model", f"x={model}", "--port", port)
        assert second.returncode == 5
        assert f"cannot listen on 127.0.0.1:{port}: port {port} is in use" in second.stderr
        assert "Traceback" not in second.stderr
        assert client.classify(IMAGE).model["name"] == "telling"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PRELUNET, "serve", *options], capture_output=True, text=True, timeout=60, check=False)


def test_a_model_file_that_cannot_be_served_exits_3_and_names_it(tmp_path: Path) -> None:
    text = tmp_path / "text.onnx"
    text.write_text("not a model")
    result = run("--model", f"x={text}", "--port", "0")
    assert result.returncode == 3
    assert str(text) in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_the_options_limit_the_size_of_images(model: Path, running: tuple[str, str]) -> None:
    with Client(running[1]) as client:
        assert client.classify(IMAGE, protocol="center").predictions
        with pytest.raises(ImageError, match=f"more than the limit of {len(IMAGE)}"):
            client.classify(IMAGE + b"\0", protocol="center")
        with pytest.raises(ImageError, match="58x40 pixels are more than the limit of 2280"):
            client.classify(png(40, 58)[: len(IMAGE)], protocol="center")
    result = run("--model", f"x={model}", "--queue-views", "0")
    assert result.returncode == 2
    assert "--queue-views" in result.stderr
