"""`prelunet serve --processes 2`: what clients, an operator and the other process see."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prelunet.evaluator.client import Client
from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.inference import inference_pb2_grpc as oip_grpc
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from tests.serving.serving_harness import eventually, png

IMAGE = png(40, 57)
CONNECTIONS = 24  # that all get to one of two processes: once in 8 million times
COMMAND = [sys.executable, "-c", "from prelunet.evaluator.cli import main; main()", "serve", "--device", "cpu"]
START = ("--port", "0", "--processes", "2", "--lame-duck", "0", "--metrics-port", "0")


class Running:
    """A server of two processes. start_line: of its output; address: of gRPC."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.process, self.start_line = process, process.stdout.readline()
        ports = dict(re.findall(r"(serving|metrics) on (\S+:\d+)", self.start_line))
        self.address, self.metrics = ports["serving"], f"http://{ports['metrics']}/metrics"

    def workers(self) -> set[int]:
        pid = self.process.pid
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()))

    def samples(self, name: str) -> dict[str, float]:
        """Return the sum of a metric's samples for each process."""
        found = Counter[str]()
        text = urllib.request.urlopen(self.metrics, timeout=20).read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels["process"]] += sample.value
        return dict(found)

    def statuses(self, model: str) -> Counter[str]:
        """Return the statuses of calls for a model, each over a connection of its own."""
        found = Counter[str]()
        with ExitStack() as stack:
            for _ in range(CONNECTIONS):
                channel = stack.enter_context(new_connection(self.address))
                try:
                    pb_grpc.PreluNetServiceStub(channel).Classify(
                        pb.ClassifyRequest(image=IMAGE, model=model), timeout=20
                    )
                    found["OK"] += 1
                except grpc.RpcError as error:
                    found[error.code().name] += 1
        return found

    def kill_one(self) -> None:
        """Kill one of the processes, and wait until another one serves in its place."""
        before = self.workers()
        os.kill(min(before), signal.SIGKILL)
        eventually(lambda: len(self.workers() - before) == 1 and len(self.samples("prelunet_ready")) == 2)


def new_connection(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),))


@contextmanager
def serving(*options: str) -> Iterator[Running]:
    process = subprocess.Popen([*COMMAND, *START, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    threading.Thread(target=lambda: [*process.stderr], daemon=True).start()  # type: ignore[misc]
    try:
        yield Running(process)
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture(scope="module")
def folder(exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two models."""
    path = tmp_path_factory.mktemp("models")
    for name in ("stays", "changes"):
        (path / name / "1").mkdir(parents=True)
        shutil.copy(exported["demo-channel"].path, path / name / "1" / "model.onnx")
    return path


@pytest.fixture
def alone(folder: Path, tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    """Return a server of its own: after several deaths of a process the next one waits long. And its folder."""
    path = shutil.copytree(folder, tmp_path / "models")
    with serving("--models", str(path)) as running:
        yield running, path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving("--models", str(folder)) as running:
        yield running


def test_new_connections_are_shared_out_and_the_metrics_of_all_processes_are_in_every_scrape(server: Running) -> None:
    assert "| 2 processes |" in server.start_line
    before = server.samples("prelunet_calls_total")
    assert server.statuses("stays") == {"OK": CONNECTIONS}
    calls = {number: count - before.get(number, 0) for number, count in server.samples("prelunet_calls_total").items()}
    assert set(calls) == {"1", "2"}
    assert min(calls.values()) > 0
    assert sum(calls.values()) == CONNECTIONS
    for _ in range(8):  # whichever process answers
        assert server.samples("prelunet_ready") == {"1": 1, "2": 1}
    assert min(server.samples("process_resident_memory_bytes").values()) > 2**24


def test_a_model_is_loaded_and_unloaded_in_all_processes_also_in_one_that_starts_later(server: Running) -> None:
    with new_connection(server.address) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        stub.RepositoryModelUnload(oip.RepositoryModelUnloadRequest(model_name="changes"), timeout=60)
        assert server.statuses("changes") == {"NOT_FOUND": CONNECTIONS}
        assert server.statuses("stays") == {"OK": CONNECTIONS}
        with pytest.raises(grpc.RpcError, match="'missing'"):
            stub.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name="missing"), timeout=60)
    server.kill_one()
    assert server.statuses("changes") == {"NOT_FOUND": CONNECTIONS}
    with new_connection(server.address) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        stub.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name="changes"), timeout=60)
        assert server.statuses("changes") == {"OK": CONNECTIONS}


def test_a_process_that_starts_while_all_models_are_unloaded_serves_them_once_they_are_loaded(
    alone: tuple[Running, Path],
) -> None:
    server, _ = alone

    def change(model: str, *, load: bool) -> None:
        with new_connection(server.address) as channel:
            stub = oip_grpc.GRPCInferenceServiceStub(channel)
            if load:
                stub.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name=model), timeout=60)
            else:
                stub.RepositoryModelUnload(oip.RepositoryModelUnloadRequest(model_name=model), timeout=60)

    for model in ("changes", "stays"):
        change(model, load=False)
    server.kill_one()
    for model in ("changes", "stays"):
        change(model, load=True)
        assert server.statuses(model) == {"OK": CONNECTIONS}


def test_after_a_load_that_fails_all_processes_serve_the_same_version(server: Running, folder: Path) -> None:
    with new_connection(server.address) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        stub.RepositoryModelUnload(oip.RepositoryModelUnloadRequest(model_name="changes"), timeout=60)
        bad = folder / "changes" / "2" / "model.onnx"
        bad.parent.mkdir()
        bad.write_bytes(b"no model")
        try:
            with pytest.raises(grpc.RpcError, match="changes/2"):
                stub.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name="changes"), timeout=60)
            assert server.statuses("changes") == {"OK": CONNECTIONS}
        finally:
            shutil.rmtree(bad.parent)


def test_a_process_that_cannot_load_what_the_others_serve_takes_no_calls(alone: tuple[Running, Path]) -> None:
    server, folder = alone
    file = folder / "changes" / "1" / "model.onnx"
    kept = file.read_bytes()
    before = server.workers()
    file.unlink()
    try:
        os.kill(min(before), signal.SIGKILL)
        eventually(lambda: len(server.workers() - before) == 1)
        first = server.workers() - before
        eventually(lambda: not first & server.workers())
        assert server.statuses("changes") == {"OK": CONNECTIONS}
    finally:
        file.write_bytes(kept)
    eventually(lambda: len(server.samples("prelunet_ready")) == 2)
    assert server.statuses("changes") == {"OK": CONNECTIONS}


def test_models_change_only_while_all_processes_serve(server: Running) -> None:
    def load() -> str:
        with new_connection(server.address) as channel:
            load = oip_grpc.GRPCInferenceServiceStub(channel).RepositoryModelLoad
            try:
                load(oip.RepositoryModelLoadRequest(model_name="stays"), timeout=60)
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()}"
            return "OK"

    os.kill(min(server.workers()), signal.SIGKILL)
    eventually(lambda: load().startswith("UNAVAILABLE: a process of this server is starting"))
    eventually(lambda: load() == "OK")


def test_after_sighup_all_processes_serve_what_the_folder_has(server: Running) -> None:
    with new_connection(server.address) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        stub.RepositoryModelUnload(oip.RepositoryModelUnloadRequest(model_name="changes"), timeout=60)
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: server.statuses("changes") == {"OK": CONNECTIONS})


def test_the_client_loses_no_call_while_processes_are_killed(server: Running) -> None:
    errors, answers, stopped = list[Exception](), Counter[int](), threading.Event()

    def call(number: int) -> None:
        with Client(server.address) as client:
            while not stopped.is_set():
                try:
                    client.classify(IMAGE, model="stays")
                    answers[number] += 1
                except Exception as error:  # whatever it is, the call is lost
                    errors.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            server.kill_one()
            before = dict(answers)
            eventually(lambda before=before: all(answers[number] > before[number] for number in range(4)))
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert not errors


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_second_server_on_the_port_is_refused(server: Running, folder: Path, processes: str) -> None:
    port = server.address.rpartition(":")[2]
    options = ("--models", str(folder), "--port", port, "--processes", processes)
    second = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 5
    assert f"port {port} is in use" in second.stderr


def test_a_signal_ends_all_processes_once_their_calls_are_answered(folder: Path) -> None:
    with serving("--models", str(folder)) as running, Client(running.address) as client:
        client.classify(IMAGE, model="stays")
        workers = running.workers()
        running.process.terminate()
        assert running.process.wait(30) == 0
        assert running.process.stdout is not None
        assert running.process.stdout.read() == "stopped; no call was lost\n"
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_sighup_while_a_process_starts_does_not_end_it(folder: Path) -> None:
    command = [*COMMAND, *START, "--models", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("| serving" in line for line in process.stderr)  # the first of two
        process.send_signal(signal.SIGHUP)
        threading.Thread(target=lambda: [*process.stderr], daemon=True).start()  # type: ignore[misc]
        running = Running(process)
        assert running.statuses("stays") == {"OK": CONNECTIONS}
        assert set(running.samples("prelunet_ready")) == {"1", "2"}
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_no_process_outlives_a_parent_that_was_killed(folder: Path) -> None:
    with serving("--models", str(folder)) as running:
        workers = running.workers()
        running.process.kill()
        running.process.wait()
        eventually(lambda: not any(alive(pid) for pid in workers))


def alive(pid: int) -> bool:
    try:
        return " (zombie)" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


def test_a_server_that_cannot_start_says_why_once(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    options = ("--model", f"m={tmp_path / 'broken.onnx'}", *START)
    failed = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 3
    assert failed.stderr.count("not an ONNX model") == 1
