import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from evaluator.client import Client
from evaluator.errors import EnvironmentFault, ImageError
from evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from serving_harness import png

PRELUNET = [sys.executable, "-c", "from evaluator.cli import main; main()"]


@pytest.fixture(scope="module")
def model(exported) -> Path:
    return exported["demo-channel"].path


@contextmanager
def serving(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run `prelunet serve` on a free port; gives the process, the start line and the address."""
    command = [*PRELUNET, "serve", "--model", f"telling={model}", "--device", "cpu", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"127\.0\.0\.1:\d+", line)
        assert address is not None, f"{line}{process.communicate(timeout=30)}"
        yield process, line, address[0]
    finally:
        process.kill()
        process.communicate()


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


def begin_evaluation(channel: grpc.Channel, sender: Sender) -> grpc.Future:
    """Begin an evaluation and return when it has reached the server."""
    stub = pb_grpc.PreluNetServiceStub(channel)
    call = stub.Evaluate.future(iter(sender), timeout=60)
    stub.Classify(pb.ClassifyRequest(image=png(40, 57)))  # on the same connection, so that it comes after
    return call


def test_the_start_line_says_address_models_provider_precision_and_versions(model: Path) -> None:
    with serving(model, "--model", f"second={model}") as (process, line, address):
        for part in (r"telling \(demo, 23 classes", r"second \(", "CPUExecutionProvider", "fp32", "onnxruntime \\d"):
            assert re.search(part, line), line
        with Client(address) as client:
            assert [served.name for served in client.models()] == ["telling", "second"]
            assert client.classify(png(40, 57), model="second").circumstances["provider"] == "CPUExecutionProvider"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_sigterm_finishes_what_is_in_flight_refuses_new_calls_and_exits_0(model: Path) -> None:
    with serving(model) as (process, _, address), grpc.insecure_channel(address) as channel:
        sender, watched = Sender(), health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        in_flight = begin_evaluation(channel, sender)
        sender.image("a")
        process.send_signal(signal.SIGTERM)
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with Client(address) as client, pytest.raises(EnvironmentFault):
            client.classify(png(40, 57))
        sender.image("b")
        sender.end()
        assert in_flight.result().report.evaluated == 2
        output, log = process.communicate(timeout=20)  # the health stream, still open, does not hold it up
        assert process.returncode == 0, log
        assert "no call was lost" in output
        assert "Traceback" not in log


def test_a_call_that_does_not_end_is_cut_off_after_the_grace_period(model: Path) -> None:
    with serving(model, "--grace", "0.3") as (process, _, address), grpc.insecure_channel(address) as channel:
        sender = Sender()
        in_flight = begin_evaluation(channel, sender)
        process.send_signal(signal.SIGTERM)
        output, log = process.communicate(timeout=20)
        assert process.returncode == 0, log
        assert "calls cut off after 0.3 s: 1" in output
        assert in_flight.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
        sender.end()


def test_a_port_in_use_exits_5_and_the_first_server_serves_on(model: Path) -> None:
    with serving(model) as (_, _, address), Client(address) as client:
        port = address.rpartition(":")[2]
        second = run("--model", f"x={model}", "--port", port)
        assert second.returncode == 5
        assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
        assert "Traceback" not in second.stderr
        assert client.classify(png(40, 57)).model["name"] == "telling"


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


def test_the_limits_of_images_and_of_waiting_are_those_of_the_options(model: Path) -> None:
    image = png(40, 57)
    small = ["--max-image-bytes", str(len(image)), "--max-image-pixels", str(40 * 57)]
    with serving(model, *small) as (_, _, address), Client(address) as client:
        assert client.classify(image, protocol="center").predictions
        with pytest.raises(ImageError, match=f"more than the limit of {len(image)}"):
            client.classify(image + b"\0", protocol="center")
        with pytest.raises(ImageError, match="58x40 pixels are more than the limit of 2280"):
            client.classify(png(40, 58)[: len(image)], protocol="center")
    result = run("--model", f"x={model}", "--max-waiting", "0")
    assert result.returncode == 2
    assert "--max-waiting" in result.stderr
