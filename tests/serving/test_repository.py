"""Models of a folder that come, change and go while a server answers calls."""

import asyncio
import gc
import io
import logging
import os
import re
import shutil
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image

from prelunet.evaluator.contract import ClassEntry, golden_image
from prelunet.evaluator.engine.session import Placement
from prelunet.evaluator.engine.verify import golden_answer
from prelunet.evaluator.errors import ContractError, EnvironmentFault, ModelRefused, UsageError
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.inference import inference_pb2_grpc as oip_grpc
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving import models, repository
from prelunet.evaluator.serving.lifecycle import ServeResult, serve
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.options import HttpOptions, ModelFile, ServeOptions
from prelunet.evaluator.serving.repository import Repository
from prelunet.evaluator.serving.server import Server
from tests.helpers.fakes import FakeSession
from tests.serving.event_loop import async_test, until
from tests.serving.serving_harness import GatedSession, eventually, png, run_in_thread

IMAGE = png(28, 41)
REQUEST = pb.ClassifyRequest(image=IMAGE, protocol="dense-28", mirror=False, top_k=6)
INTERVAL = 0.05  # seconds between two looks


class GoldenSession(GatedSession):
    """A fake with golden images, whose gate is open. wrong: they are those of another model."""

    def __init__(self, seed: int, *, wrong: bool = False) -> None:
        super().__init__(seed=seed)
        self.gate.set()
        oracle = FakeSession(seed=seed + 100 * wrong)
        size = (41, 35)
        outputs = oracle.run(golden_image(*size)[None], np.array([size]))
        golden = golden_answer(*size, outputs.scores[0].astype(np.float64), outputs.logits[0].astype(np.float64))
        self.contract = replace(self.contract, golden=(golden,))


@dataclass
class Folder:
    """A folder of models, and what has been loaded from it.

    A file has the seed of a fake session; "broken" is no model, "wrong" one that fails its golden images.
    sessions: by seed, the latest of each; devices: requested for each of `opened`; classes: of files that are loaded
    from now on, if not the fake's; loading: set while a file is loaded, if `held`, until `go`.
    """

    path: Path
    sessions: "weakref.WeakValueDictionary[int, GoldenSession]" = field(default_factory=weakref.WeakValueDictionary)
    opened: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    classes: tuple[ClassEntry, ...] | None = None
    held: bool = False
    loading: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def file(self, name: str) -> Path:
        return self.path / name / "model.onnx"

    def write(self, name: str, content: object) -> None:
        """Write a version as a careful copy does, and so that it differs from a file before it."""
        file = self.file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".new").write_text(f"{content}")
        file.with_suffix(".new").replace(file)

    def open(self, path: Path, placement: Placement) -> GoldenSession:
        self.opened.append("/".join(path.parts[-3:-1]))
        self.devices.append(placement.device)
        content = path.read_text()
        if self.held:
            self.loading.set()
            assert self.go.wait(30)
        if content == "broken":
            raise ContractError(f"{path}: not an ONNX model")
        session = GoldenSession(7, wrong=True) if content == "wrong" else GoldenSession(int(content))
        if self.classes is not None:
            session.contract = replace(session.contract, classes=self.classes)
        self.sessions[int(content) if content.isdecimal() else 7] = session
        return session


@dataclass
class Running:
    """A server of a folder. stopping: set when it begins to stop."""

    folder: Folder
    models: Models
    stub: pb_grpc.PreluNetServiceStub
    oip: oip_grpc.GRPCInferenceServiceStub
    health: health_pb2_grpc.HealthStub
    http: httpx.Client
    repository: Repository
    stopping: threading.Event

    def served(self) -> dict[str, int]:
        return {model.name: model.version for model in self.stub.ListModels(pb.ListModelsRequest()).models}

    def problems(self) -> dict[str, str]:
        listed = self.stub.ListModels(pb.ListModelsRequest()).problems
        return {f"{each.name}/{each.version}": each.reason for each in listed}

    def index(self) -> dict[str, tuple[str, str]]:
        listed = self.oip.RepositoryIndex(oip.RepositoryIndexRequest()).models
        return {f"{each.name}/{each.version}": (each.state, each.reason) for each in listed}

    def load(self, model: str) -> None:
        self.oip.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name=model), timeout=30)

    def unload(self, model: str) -> None:
        self.oip.RepositoryModelUnload(oip.RepositoryModelUnloadRequest(model_name=model), timeout=30)

    def classify(self, model: str = "") -> pb.ClassifyResponse:
        return self.stub.Classify(
            pb.ClassifyRequest(image=IMAGE, model=model, protocol="dense-28", mirror=False, top_k=6), timeout=30
        )

    def metric(self, name: str, **labels: str) -> float:
        return self.models.metrics.registry.get_sample_value(f"prelunet_{name}", labels) or 0

    def count(self, outcome: str) -> float:
        return self.metric("reloads_total", files="models", outcome=outcome)


def scores_of(seed: int) -> list[float]:
    """Return the scores of IMAGE by the model with this seed, computed without a server."""
    pixels = np.asarray(Image.open(io.BytesIO(IMAGE)))
    outputs = FakeSession(seed=seed).run(pixels[None], np.array([pixels.shape[:2]]))
    return [pytest.approx(score, abs=1e-6) for score in outputs.scores[0].tolist()]  # float32


def answered_by(response: pb.ClassifyResponse) -> tuple[int, list[float]]:
    """Return the version that an answer states, and its scores by class."""
    scores = {each.class_index: each.score for each in response.predictions}
    return response.model.version, [scores[index] for index in sorted(scores)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    folder = Folder(tmp_path / "models")
    monkeypatch.setattr(models, "open_with_placement", folder.open)
    monkeypatch.setattr(repository, "INTERVAL", INTERVAL)
    return folder


@contextmanager
def serving(folder: Folder, *fixed: tuple[ModelFile, Any], memory: int | None = None) -> Iterator[Running]:
    """Serve a folder, and sessions as of --model. memory: --memory-limit."""
    stopping = threading.Event()
    options = ServeOptions(tuple(file for file, _ in fixed), folder.path, placement=Placement(memory=memory))

    @asynccontextmanager
    async def served() -> AsyncIterator[tuple[Server, Models, Repository]]:
        server, loaded = Server("127.0.0.1", 0, http=HttpOptions(port=0)), Models(fixed, DecodeLimits())
        source = Repository(folder.path, loaded, options, stopping.is_set)
        await source.start()
        await server.start(loaded, source)
        watching = asyncio.create_task(source.watch())
        yield server, loaded, source
        watching.cancel()
        await server.stop(grace=5)
        await asyncio.to_thread(loaded.close)

    with run_in_thread(served) as ((server, loaded, source), _), grpc.insecure_channel(server.address) as channel:
        stubs = pb_grpc.PreluNetServiceStub(channel), oip_grpc.GRPCInferenceServiceStub(channel)
        with httpx.Client(base_url=server.http_url, trust_env=False, verify=False) as http:
            yield Running(folder, loaded, *stubs, health_pb2_grpc.HealthStub(channel), http, source, stopping)


def status_of(call: Callable[..., object], *arguments: object) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as failed:
        call(*arguments)
    return failed.value.code().name, failed.value.details()


def test_new_calls_get_the_new_version_and_calls_in_flight_finish_on_theirs(folder: Folder) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        assert answered_by(server.classify()) == (1, scores_of(1))
        old = folder.sessions[1]
        old.entered.clear()
        old.gate.clear()
        first = server.stub.Classify.future(REQUEST)
        assert old.entered.wait(30)
        waiting = server.stub.Classify.future(REQUEST)  # not on the device yet
        eventually(lambda: server.metric("waiting_images", model="six") == 2)
        folder.write("six/2", 2)
        eventually(lambda: server.served() == {"six": 2})
        new = server.stub.Classify.future(REQUEST)
        eventually(lambda: server.metric("waiting_images", model="six") == 3)
        old.gate.set()
        assert answered_by(first.result(30)) == answered_by(waiting.result(30)) == (1, scores_of(1))
        assert answered_by(new.result(30)) == (2, scores_of(2))
        assert server.problems() == {}


def test_an_evaluation_stays_with_its_version_and_a_stream_gets_the_new_one(folder: Folder) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        switched = threading.Event()

        def images() -> Iterator[pb.EvaluateRequest]:
            yield pb.EvaluateRequest(start=pb.EvaluateStart(dataset="photos", protocol="center"))
            yield pb.EvaluateRequest(image=pb.LabelledImage(file="a", data=IMAGE, label=1))
            assert switched.wait(30)
            yield pb.EvaluateRequest(image=pb.LabelledImage(file="b", data=IMAGE, label=1))

        def requests() -> Iterator[pb.ClassifyStreamRequest]:
            yield pb.ClassifyStreamRequest(id="before", request=REQUEST)
            assert switched.wait(30)
            yield pb.ClassifyStreamRequest(id="after", request=REQUEST)

        evaluation, stream = server.stub.Evaluate(images()), server.stub.ClassifyStream(requests())
        before = next(stream)
        assert answered_by(before.response) == (1, scores_of(1))
        old, sha256 = weakref.ref(folder.sessions[1]), folder.sessions[1].model_sha256
        eventually(lambda: server.metric("request_seconds_count", model="six") == 2)
        folder.write("six/2", 2)
        eventually(lambda: server.served() == {"six": 2})
        assert old() is not None, "the evaluation still needs it"
        switched.set()
        assert answered_by(next(stream).response) == (2, scores_of(2))
        report = next(each for each in evaluation if each.HasField("report")).report
        assert (report.images, report.model.sha256) == (2, sha256)


def test_the_memory_of_a_version_is_freed_when_its_last_call_has_ended(folder: Folder) -> None:
    """Also of calls with errors, which are in reference cycles."""
    folder.write("six/1", 1)
    with serving(folder) as server:
        gc.collect()
        gc.disable()
        try:
            assert status_of(server.stub.Classify, pb.ClassifyRequest(image=b"x"))[0] == "INVALID_ARGUMENT"
            old = folder.sessions[1]
            old.entered.clear()
            old.gate.clear()
            calls = [server.stub.Classify.future(REQUEST) for _ in range(3)]
            assert old.entered.wait(30)
            freed, old = weakref.ref(old), None
            folder.write("six/2", 2)
            eventually(lambda: server.served() == {"six": 2})
            calls[1].cancel()
            assert freed() is not None
            freed().gate.set()
            for call in (calls[0], calls[2]):
                assert call.result(30).model.version == 1
            eventually(lambda: freed() is None)
            assert [session.model_sha256 for session in server.models.sessions()] == [folder.sessions[2].model_sha256]
        finally:
            gc.enable()


def test_a_copy_that_still_grows_is_not_read(folder: Folder) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        growing = folder.file("six/2")
        growing.parent.mkdir()
        for _ in range(40):  # 0.4 s, eight looks
            with growing.open("a") as file:
                file.write("x")
            time.sleep(INTERVAL / 5)
        assert "six/2" not in folder.opened
        growing.write_text("2")
        eventually(lambda: server.served() == {"six": 2})
        assert folder.opened == ["six/1", "six/2"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("broken", "six/2/model.onnx: not an ONNX model"),
        ("wrong", "--device cpu: model.onnx: in fp32 on CPUExecutionProvider the scores of the golden image of 41x35"),
    ],
)
def test_a_broken_version_leaves_the_old_one_and_the_reason_is_in_log_metric_and_lists(
    folder: Folder, caplog: pytest.LogCaptureFixture, content: str, reason: str
) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        folder.write("six/2", content)
        eventually(lambda: server.count("refused") == 1)
        assert answered_by(server.classify()) == (1, scores_of(1))
        (stated,) = server.problems().values()
        assert re.match(reason, stated)
        assert f"{folder.path}" not in stated, "a caller should not learn the server's paths"
        assert server.index() == {"six/1": ("READY", ""), "six/2": ("UNAVAILABLE", stated)}
        (logged,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert logged == f"model six/2 is not served; version 1 stays: {stated}"
        assert status_of(server.load, "six") == ("FAILED_PRECONDITION", f"six/2: {stated}"[:1200])
        time.sleep(4 * INTERVAL)
        assert server.count("refused") == 2, "the file should be tried again only on request, or once it changes"
        folder.write("six/2", 2)
        eventually(lambda: server.served() == {"six": 2})
        assert server.problems() == {}


@pytest.mark.parametrize(
    ("memory", "limit"), [(None, "but this machine has"), (8 * 2**30, "but --memory-limit leaves this process 8.00G")]
)
def test_a_version_that_needs_more_memory_than_there_is_is_not_loaded(
    folder: Folder, memory: int | None, limit: str
) -> None:
    folder.write("six/1", 1)
    with serving(folder, memory=memory) as server:
        folder.write("six/2", 2)
        eventually(lambda: server.served() == {"six": 2})
        folder.file("six/3").parent.mkdir()
        with folder.file("six/3").open("wb") as file:
            file.truncate(2**42 if memory is None else 2**33)  # without blocks on the disk
        eventually(lambda: server.count("refused") == 1)
        assert limit in server.problems()["six/3"]
        assert "six/3" not in folder.opened
        assert server.classify().model.version == 2


def test_auto_chooses_the_runtime_of_each_version_on_a_cpu_as_after_a_restart(folder: Folder) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        folder.write("six/2", 2)
        eventually(lambda: server.served() == {"six": 2})
    assert folder.devices == ["auto", "auto"]


def test_of_two_versions_that_arrive_at_once_the_newest_is_served_or_else_the_other(folder: Folder) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        folder.write("six/2", 2)
        folder.write("six/3", 3)
        eventually(lambda: server.served() == {"six": 3})
        assert folder.opened == ["six/1", "six/3"]
        folder.write("six/11", 4)
        folder.write("six/10", 5)
        folder.write("six/12", "broken")
        eventually(lambda: server.served() == {"six": 11})
        assert list(server.problems()) == ["six/12"]


def test_loads_wait_for_each_other_and_continue_when_their_caller_leaves(folder: Folder) -> None:
    folder.write("six/1", 1)
    folder.write("two/1", 2)
    with serving(folder) as server:
        folder.held = True
        folder.write("six/2", 3)
        folder.write("two/2", 4)
        assert folder.loading.wait(30)
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            server.oip.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name="two"), timeout=0.3)
        late = server.http.post("/v2/repository/models/two/load", headers={"x-request-timeout": "0.3"})
        assert (late.status_code, "the model is still being loaded" in late.json()["error"]) == (504, True)
        assert len(folder.opened) == 3, "each load takes much memory"
        assert answered_by(server.classify("six")) == (1, scores_of(1))
        folder.go.set()
        eventually(lambda: server.served() == {"six": 2, "two": 2})


def test_nothing_is_loaded_while_the_server_stops(folder: Folder) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        folder.held = True
        folder.write("six/2", 2)
        assert folder.loading.wait(30)
        server.stopping.set()
        folder.go.set()
        eventually(lambda: server.problems() == {"six/2": "the server is stopping"})
        assert status_of(server.load, "six") == ("FAILED_PRECONDITION", "six/2: the server is stopping")
        assert answered_by(server.classify()) == (1, scores_of(1))
        assert (folder.opened, server.count("refused")) == (["six/1", "six/2"], 2)


def test_a_deleted_version_is_served_from_memory_until_another_takes_its_place(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        session = folder.sessions[1]
        session.entered.clear()
        session.gate.clear()
        call = server.stub.Classify.future(REQUEST)
        assert session.entered.wait(30)
        shutil.rmtree(folder.path)
        eventually(lambda: server.problems() == {"six/1": repository._DELETED})
        session.gate.set()
        assert answered_by(call.result(30)) == answered_by(server.classify()) == (1, scores_of(1))
        assert server.index() == {"six/1": ("READY", repository._DELETED)}
        assert server.count("deleted") == 1
        assert f"model six/1: {repository._DELETED}" in caplog.text
        folder.write("six/2", 2)
        eventually(lambda: server.served() == {"six": 2})
        assert server.problems() == {}


def test_a_file_that_is_not_named_as_a_version_is_logged_once_as_ignored(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        ignored = [
            "mine.onnx", "six/model.onnx", "six/3/mine.onnx", "six/v2/model.onnx", "six/04/model.onnx",
            "-x/1/model.onnx",
        ]  # fmt: skip
        for name in (*ignored, "six/.4/model.onnx"):
            (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
            (folder.path / name).write_text("2")
        eventually(lambda: caplog.text.count("is ignored") == len(ignored))
        time.sleep(4 * INTERVAL)
        found = re.findall(r"(\S+) is ignored: a version is in NAME/VERSION/model.onnx", caplog.text)
        assert sorted(found) == sorted(ignored)
        assert server.served() == {"six": 1}


def test_a_version_with_other_classes_is_served_with_a_warning(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        folder.write("six/2", 2)
        eventually(lambda: server.served() == {"six": 2})
        assert "other classes" not in caplog.text
        folder.classes = tuple(reversed(GoldenSession(1).contract.classes))
        folder.write("six/3", 3)
        eventually(lambda: server.served() == {"six": 3})
        assert "model six/3 has other classes than version 2" in caplog.text


def test_deleting_the_newest_version_returns_to_the_one_before_it(folder: Folder) -> None:
    folder.write("six/1", 1)
    folder.write("six/2", 2)
    with serving(folder) as server:
        assert server.served() == {"six": 2}
        shutil.rmtree(folder.path / "six" / "2")
        eventually(lambda: server.served() == {"six": 1})
        assert server.problems() == {}


def test_a_file_that_is_replaced_is_loaded_again_and_a_broken_one_changes_nothing(folder: Folder) -> None:
    folder.write("six/1", 1)
    folder.write("six/2", 2)
    with serving(folder) as server:
        folder.write("six/2", 3)
        eventually(lambda: answered_by(server.classify()) == (2, scores_of(3)))
        folder.write("six/2", "broken")
        eventually(lambda: server.count("refused") == 1)
        time.sleep(4 * INTERVAL)
        assert answered_by(server.classify()) == (2, scores_of(3))
        assert "six/1" not in folder.opened


def test_an_older_version_is_served_beside_the_newest_once_it_is_loaded_by_its_number(folder: Folder) -> None:
    folder.write("six/1", 1)
    folder.write("six/2", 2)
    with serving(folder) as server:
        assert status_of(server.classify, "six/1") == ("NOT_FOUND", "model 'six' has no loaded version '1'. Loaded: 2")
        server.load("six/1")
        assert answered_by(server.classify("six/1")) == (1, scores_of(1))
        assert answered_by(server.classify("six")) == answered_by(server.classify("six/2")) == (2, scores_of(2))
        raw = len(IMAGE).to_bytes(4, "little") + IMAGE
        tensor = oip.ModelInferRequest.InferInputTensor(name="images", datatype="BYTES", shape=[1])
        for version, used in (("1", "1"), ("", "2"), ("2", "2")):
            request = oip.ModelInferRequest(
                model_name="six", model_version=version, inputs=[tensor], raw_input_contents=[raw]
            )
            request.parameters["protocol"].string_param = "dense-28"
            request.parameters["mirror"].bool_param = False
            response = server.oip.ModelInfer(request, timeout=30)
            assert response.model_version == used
            assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == scores_of(int(used))
        versions = server.oip.ModelMetadata(oip.ModelMetadataRequest(name="six")).versions
        assert versions == ["2", "1"]
        assert server.stub.GetModel(pb.GetModelRequest(name="six/1")).model.version == 1
        folder.write("six/3", 3)
        eventually(lambda: server.served() == {"six": 3})
        assert set(server.index()) == {"six/3", "six/1"}, "version 2 should be gone, version 1 was asked for"
        server.unload("six/1")
        assert server.index() == {"six/3": ("READY", ""), "six/1": ("UNAVAILABLE", "unloaded")}


def test_an_unloaded_model_is_gone_until_it_is_loaded_or_a_new_version_arrives(folder: Folder) -> None:
    folder.write("six/1", 1)
    folder.write("two/1", 2)
    with serving(folder) as server:
        server.unload("six")
        assert server.served() == {"two": 1}
        assert status_of(server.classify, "six") == ("NOT_FOUND", "no model 'six' is served. There are: two")
        time.sleep(4 * INTERVAL)
        assert server.index() == {"two/1": ("READY", ""), "six/1": ("UNAVAILABLE", "unloaded")}
        server.load("six")
        assert answered_by(server.classify("six")) == (1, scores_of(1))
        server.unload("six")
        folder.write("six/2", 3)
        eventually(lambda: server.served() == {"two": 1, "six": 2})
        assert server.count("unloaded") == 2
        server.unload("six")
        server.unload("two")
        assert status_of(server.classify) == ("NOT_FOUND", "no model is served: all are unloaded")


def test_an_unloaded_newest_version_is_replaced_by_the_one_before_it_without_a_gap(folder: Folder) -> None:
    folder.write("six/1", 1)
    folder.write("six/2", 2)
    with serving(folder) as server:
        folder.held = True
        unloading = server.oip.RepositoryModelUnload.future(oip.RepositoryModelUnloadRequest(model_name="six/2"))
        assert folder.loading.wait(30)
        assert answered_by(server.classify()) == (2, scores_of(2))
        folder.go.set()
        unloading.result(30)
        assert answered_by(server.classify()) == (1, scores_of(1))
        assert server.index() == {"six/1": ("READY", ""), "six/2": ("UNAVAILABLE", "unloaded")}


def test_a_model_of_the_command_line_does_not_change(folder: Folder) -> None:
    folder.write("six/1", 1)
    with serving(folder, (ModelFile("fixed", Path("fixed.onnx")), FakeSession(seed=9))) as server:
        folder.write("fixed/5", 2)
        eventually(lambda: "fixed/5" in server.problems())
        assert "a model of this name was given by --model" in server.problems()["fixed/5"]
        assert answered_by(server.classify("fixed")) == (1, scores_of(9))
        code, text = status_of(server.unload, "fixed")
        assert (code, "given by --model" in text) == ("INVALID_ARGUMENT", True)
        assert server.served() == {"fixed": 1, "six": 1}


@pytest.mark.parametrize("method", ["RepositoryModelLoad", "RepositoryModelUnload"])
def test_requests_to_load_and_unload_name_a_model_and_nothing_else(folder: Folder, method: str) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        send, kind = getattr(server.oip, method), getattr(oip, f"{method}Request")
        for name in ("", "eight", "six/7", "six/", "six/01"):
            assert status_of(send, kind(model_name=name))[0] == "NOT_FOUND", name
        assert status_of(send, kind(model_name="six", repository_name="r"))[0] == "INVALID_ARGUMENT"
        request = kind(model_name="six")
        request.parameters["file:1/model.onnx"].bytes_param = b"x"
        assert status_of(send, request)[0] == "INVALID_ARGUMENT"
        assert server.served() == {"six": 1}


def test_models_are_loaded_and_unloaded_over_http(folder: Folder) -> None:
    folder.write("six/1", 1)
    folder.write("six/2", 2)
    with serving(folder) as server:
        path = "/v2/repository/models/six"
        for url, body in ((f"{path}/versions/1/load", b""), (f"{path}/load", b'{"parameters": {}}')):
            answer = server.http.post(url, content=body)
            assert (answer.status_code, answer.json()) == (200, {})
        assert set(server.index()) == {"six/1", "six/2"}
        unloading = server.http.post(f"{path}/unload", json={"parameters": {"unload_dependents": False}})
        assert (unloading.status_code, server.served()) == (200, {})
        for body in (b"[]", b'{"other": 1}', b'{"parameters": {"config": "{}"}}'):
            assert server.http.post(f"{path}/load", content=body).status_code == 400, body
        assert server.http.post("/v2/repository/models/eight/load").status_code == 404
        assert server.http.post(f"{path}/load").status_code == 200
        assert server.http.get("/v1/models/six/2").json()["version"] == 2


def test_the_index_over_http_can_be_limited_to_models_that_are_ready(folder: Folder) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        server.http.post("/v2/repository/models/six/load")
        folder.write("six/2", "broken")
        refused = server.http.post("/v2/repository/models/six/versions/2/load")
        assert (refused.status_code, "not an ONNX model" in refused.json()["error"]) == (400, True)

        def listed(body: bytes) -> list[str]:
            return [each["version"] for each in server.http.post("/v2/repository/index", content=body).json()]

        assert (listed(b""), listed(b'{"ready": false}'), listed(b'{"ready": true}')) == (["1", "2"], ["1", "2"], ["1"])
        assert server.http.post("/v2/repository/index", content=b'{"ready": 1}').status_code == 400


def test_health_knows_each_model_and_its_watchers_see_it_go(folder: Folder) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:

        def check(name: str) -> int:
            return server.health.Check(health_pb2.HealthCheckRequest(service=name)).status

        serving_, unknown = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert {check(name) for name in ("", "six", "six/1", "liveness")} == {serving_}
        assert status_of(check, "six/2")[0] == "NOT_FOUND"
        watch = server.health.Watch(health_pb2.HealthCheckRequest(service="six"))
        assert next(watch).status == serving_
        server.unload("six")
        assert next(watch).status == unknown
        watch.cancel()


def test_a_version_that_is_a_pipe_is_refused_and_a_later_one_is_served(folder: Folder) -> None:
    folder.write("six/1", 1)
    with serving(folder) as server:
        folder.file("six/2").parent.mkdir()
        os.mkfifo(folder.file("six/2"))
        eventually(lambda: "six/2/model.onnx: not a regular file" in server.problems().get("six/2", ""))
        folder.write("six/3", 3)
        eventually(lambda: server.served() == {"six": 3})


def test_what_is_no_model_of_the_folder_is_passed_over(folder: Folder) -> None:
    folder.write("six/1", 1)
    for name in ("six/0", "six/02", "six/v3", "six/-4", "six/5.new", "two words/1", ".hidden/1"):
        folder.write(name, 2)
    with serving(folder) as server:
        assert (server.served(), server.problems()) == ({"six": 1}, {})


def test_a_server_starts_with_the_newest_version_that_can_be_loaded(folder: Folder) -> None:
    folder.write("six/1", 1)
    folder.write("six/2", "broken")
    with serving(folder) as server:
        assert server.served() == {"six": 1}
        assert server.problems() == {"six/2": "six/2/model.onnx: not an ONNX model"}


def test_a_server_starts_with_the_good_models_and_reports_the_bad_ones(folder: Folder) -> None:
    folder.write("bad/1", "broken")
    folder.write("bad/2", "wrong")
    folder.write("six/1", 1)
    with serving(folder) as server:
        assert server.served() == {"six": 1}
        assert set(server.problems()) == {"bad/1", "bad/2"}
        assert server.count("refused") == 2
        folder.write("bad/3", 3)
        eventually(lambda: server.served() == {"six": 1, "bad": 3})


def test_a_restart_loads_unloaded_versions_and_forgets_deleted_and_pinned_ones(folder: Folder) -> None:
    for name, seed in (("gone/1", 1), ("six/1", 2), ("six/2", 3), ("two/1", 4)):
        folder.write(name, seed)
    with serving(folder) as server:
        server.load("six/1")
        server.unload("two")
        shutil.rmtree(folder.path / "gone")
        eventually(lambda: "gone/1" in server.problems())
        assert server.served() == {"gone": 1, "six": 2}
        server.classify("six/1")
    with serving(folder) as server:
        assert server.served() == {"six": 2, "two": 1}
        with pytest.raises(grpc.RpcError, match="no loaded version '1'"):
            server.classify("six/1")


@async_test
async def test_a_server_without_a_model_that_can_be_loaded_does_not_start(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(path: Path, *_: object) -> GoldenSession:
        if "six" in path.parts:
            raise EnvironmentFault("--device cuda: unavailable")
        return folder.open(path, Placement("cpu"))

    options = ServeOptions((), folder.path, port=0)
    with pytest.raises(UsageError, match=r"no such folder. Create NAME/VERSION/model.onnx in it"):
        await serve(options, lambda _: None)
    folder.path.mkdir()
    with pytest.raises(UsageError, match=r"no model there. Create NAME/VERSION/model.onnx in it"):
        await serve(options, lambda _: None)
    folder.write("two/1", "broken")
    with pytest.raises(ModelRefused, match=r"two/1: two/1/model.onnx: not an ONNX model"):
        await serve(options, lambda _: None)
    folder.write("six/1", 1)
    with pytest.raises(ModelRefused, match=r"two/1: two/1/model.onnx: not an ONNX model"):
        await serve(replace(options, strict=True), lambda _: None)
    monkeypatch.setattr(models, "open_with_placement", unavailable)
    with pytest.raises(
        EnvironmentFault, match=r"six/1: --device cuda: unavailable"
    ):  # two/1 is broken, and comes later
        await serve(options, lambda _: None)
    with pytest.raises(UsageError, match=r"--model NAME=MODEL.onnx, or --models DIR"):
        ServeOptions(())


@async_test
async def test_sighup_tries_again_what_was_refused_and_does_not_stop_the_server(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write("six/1", 1)
    folder.write("six/2", "broken")
    caplog.set_level(logging.INFO)
    started = asyncio.Event()
    serving_ = asyncio.create_task(serve(ServeOptions((), folder.path, port=0, lame_duck=0), lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 30)
    monkeypatch.setattr(models, "open_with_placement", lambda *_: GoldenSession(2))  # the file is the same
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: "model six/2 is loaded: sha256" in caplog.text)
    assert not serving_.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving_ == ServeResult()
