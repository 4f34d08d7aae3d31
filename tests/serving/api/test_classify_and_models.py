import asyncio
import gc
import io
import json
import re
import subprocess
import sys
import threading
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import ParseDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from PIL import Image

from prelunet.evaluator.answer import Timings
from prelunet.evaluator.cli import run
from prelunet.evaluator.engine import classify
from prelunet.evaluator.engine import heatmap as overlay
from prelunet.evaluator.engine.classify import build_answer, classify_images
from prelunet.evaluator.engine.heatmap import draw_heat_maps, heat_maps
from prelunet.evaluator.errors import EnvironmentFault, UsageError
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.imaging.resize import panel_picture
from prelunet.evaluator.pb.inference import inference_pb2 as inference_pb
from prelunet.evaluator.pb.inference import inference_pb2_grpc as inference_grpc
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.protocols import ProtocolOverrides, build_protocol
from prelunet.evaluator.rpc.convert import answer_from_message
from prelunet.evaluator.serving import decoding, evaluation, models
from prelunet.evaluator.serving.api import prelunet
from prelunet.evaluator.serving.api.prelunet import SERVICE
from prelunet.evaluator.serving.lifecycle import serve
from prelunet.evaluator.serving.options import ModelFile, ServeOptions, ServerLimits, parse_models
from prelunet.evaluator.serving.scheduling.model import RequestOptions
from prelunet.evaluator.serving.scheduling.request import Answered
from tests.conftest import ExportedNet
from tests.helpers.fakes import FakeSession, fake_contract
from tests.serving.api.inference_calls import infer_request
from tests.serving.scheduling.scheduler_harness import build_model
from tests.serving.serving_harness import GatedSession, eventually, png, running_server

SMALL = fake_contract(classes=3, default_scales=(31, 44))


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    sessions = {"six": FakeSession(), "three": FakeSession(SMALL, seed=1)}
    with running_server(**sessions) as server, grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel):
    return pb_grpc.PreluNetServiceStub(channel)


def request(**changes) -> pb.ClassifyRequest:
    return pb.ClassifyRequest(**{"image": png(40, 57, seed=1), "model": "six", **changes})


def failure(call, *arguments) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=30)
    return caught.value.code(), caught.value.details()


def without_timings(response: pb.ClassifyResponse) -> pb.ClassifyResponse:
    response.ClearField("timings")
    return response


@pytest.mark.parametrize(
    ("model", "protocol"),
    [
        ("six", ""),
        ("three", ""),
        *[("six", name) for name in ("center", "dense-37", "dense-33-45", "ten-crop", "spp-18", "spp-net", "resnet")],
    ],
)
def test_the_answer_is_that_of_the_model_file(stub, model: str, protocol: str) -> None:
    session = FakeSession() if model == "six" else FakeSession(SMALL, seed=1)
    requested = build_protocol(protocol or "multi-scale", session.contract)
    data = png(40, 57, seed=1)
    (alone,) = classify_images(session, [decode_rgb(data)], requested)
    answer = stub.Classify(request(image=data, model=model, protocol=protocol))
    classes = session.contract.classes
    best = alone.top(5)
    assert [(p.class_index, p.wnid, p.name) for p in answer.predictions] == [
        (index, classes[index].wnid, classes[index].name) for index, _ in best
    ]
    np.testing.assert_allclose([p.score for p in answer.predictions], [score for _, score in best], rtol=1e-6)
    assert [(v.scale, v.mirrored, v.part, v.windows.rows, v.windows.columns) for v in answer.views] == [
        (v.view.scale, v.view.mirrored, v.view.part, *v.windows) for v in alone.views
    ]
    assert (answer.model.name, answer.model.sha256) == (model, session.model_sha256)
    assert (answer.protocol.name, answer.capped, answer.circumstances.provider) == (
        protocol or "multi-scale",
        False,
        "CPUExecutionProvider",
    )


@pytest.mark.parametrize(
    ("changes", "scales", "mirror"),
    [
        ({"scales": [33, 45]}, (33, 45), True),
        ({"mirror": False}, (32, 48, 60), False),
        ({"scales": [41], "mirror": False}, (41,), False),
        ({"protocol": "spp-18", "scales": [41], "mirror": True}, (41,), True),
        ({"protocol": "dense-37", "mirror": True}, (37,), True),
    ],
)
def test_the_caller_may_choose_scales_and_mirroring(stub, changes: dict, scales: tuple, mirror: bool) -> None:
    session, data = FakeSession(), png(40, 57, seed=1)
    own = ProtocolOverrides(tuple(changes.get("scales", ())) or None, changes.get("mirror"))
    protocol = build_protocol(changes.get("protocol", "multi-scale"), session.contract, own)
    (alone,) = classify_images(session, [decode_rgb(data)], protocol)
    answer = stub.Classify(request(image=data, **changes))
    assert (tuple(answer.protocol.scales), answer.protocol.mirror) == (scales, mirror)
    assert {view.scale for view in answer.views} == set(scales)
    assert {view.mirrored for view in answer.views} == ({False, True} if mirror else {False})
    best = alone.top(5)
    assert [p.class_index for p in answer.predictions] == [index for index, _ in best]
    np.testing.assert_allclose([p.score for p in answer.predictions], [score for _, score in best], rtol=1e-6)


def test_the_message_of_an_answer_is_its_json_with_every_field_and_digit() -> None:
    session = FakeSession(fake_contract(classes=1000))
    served = build_model(session)
    served.version = 3
    for name, timings in (
        ("multi-scale", Timings(0.0, 0.0, 0.0, 0.0, 1)),
        ("multi-scale", Timings(0.1, 1 / 3, 1e-9, 2.5, 7)),  # whose constant part is known already
        ("ten-crop", Timings(0.1, 1 / 3, 1e-9, 2.5, 7)),
    ):
        protocol = build_protocol(name, session.contract)
        (classified,) = classify_images(session, [decode_rgb(png(40, 57))], protocol)
        answer = build_answer(session, "fake", protocol, classified, 1000, b"a picture")
        answer = replace(answer, model={**answer.model, "version": 3}, timings=timings)
        answered = Answered(served, served.plan(RequestOptions(name, top=1000)), classified, timings, b"a picture")
        message = pb.ClassifyResponse.FromString(prelunet.classify_response(answered))
        assert message == ParseDict({**answer.to_json()}, pb.ClassifyResponse(heatmap=b"a picture"))
        back = answer_from_message(pb.ClassifyResponse.FromString(message.SerializeToString()))
        assert (back, back.timings, back.heatmap) == (answer, timings, b"a picture")


@pytest.mark.parametrize("protocol", ["dense-40", "center"])
def test_maps_are_the_heat_maps_of_the_best_classes_on_a_grid_over_the_image(stub, protocol: str) -> None:
    session, data = FakeSession(), png(40, 57, seed=1)
    requested = build_protocol(protocol, session.contract)
    (alone,) = classify_images(session, [decode_rgb(data)], requested, keep_windows=True)
    answer = stub.Classify(request(image=data, protocol=protocol, maps=True))
    assert not answer.heatmap
    assert not stub.Classify(request(image=data, protocol=protocol)).maps
    best = [index for index, _ in alone.top(5)]
    assert [each.class_index for each in answer.maps] == best
    expected = heat_maps(alone, best, (40, 57), (20, 28), session.contract, requested)  # 28 * 40 / 57 = 19.6
    for each, of_class in zip(answer.maps, expected, strict=True):
        assert (each.rows, each.columns, each.image_height, each.image_width) == (20, 28, 40, 57)
        scores = np.array(each.scores).reshape(20, 28)
        np.testing.assert_array_equal(scores == -1, np.isnan(of_class))
        # The fake's einsum may add in another order, and the message has 32 bits.
        np.testing.assert_allclose(scores, np.nan_to_num(of_class, nan=-1), rtol=1e-5)
    assert (protocol == "center") == np.isnan(expected).any()


def test_maps_alone_take_no_time_for_a_picture(stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def resized(_: object) -> None:
        raise AssertionError("nobody draws on it")

    monkeypatch.setattr(decoding, "panel_picture", resized)
    assert stub.Classify(request(image=png(40, 57), protocol="dense-40", maps=True)).maps


@pytest.mark.parametrize("name", ["ten-crop", "spp-18", "multi-scale"])
def test_the_verb_prints_the_same_through_a_server_as_with_the_model_file(
    exported: dict[str, ExportedNet], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    model, image = exported["demo-image"], tmp_path / "image.png"
    image.write_bytes(png(40, 57, seed=1))
    printed, drawn = [], []
    with running_server(demo=model.session) as server:
        for place, way in enumerate((["--model", str(model.path)], ["--server", server.address])):
            heatmap = tmp_path / f"{place}.png"
            arguments = ["classify", str(image), *way, "--protocol", name, "--json", "--heatmap", str(heatmap)]
            assert run(arguments) == 0
            printed.append(json.loads(capsys.readouterr().out))
            drawn.append(heatmap.read_bytes())
    assert printed[1].pop("timings")["batches"] >= 1
    assert printed[1]["model"].pop("version") == 1
    assert printed[0] == printed[1]
    assert printed[0]["protocol"]["name"] == name
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("name", ["multi-scale", "ten-crop"])
def test_the_heat_map_of_a_server_is_that_of_the_model_file(stub, name: str) -> None:
    session, data = FakeSession(), png(40, 57, seed=1)
    protocol = build_protocol(name, session.contract)
    (alone,) = classify_images(session, [decode_rgb(data)], protocol, keep_windows=True)
    image = decode_rgb(data)
    expected = draw_heat_maps(panel_picture(image), image.shape[:2], alone, session.contract, protocol)
    with Image.open(io.BytesIO(stub.Classify(request(image=data, protocol=name, heatmap=True)).heatmap)) as drawn:
        np.testing.assert_array_equal(np.asarray(drawn), expected)
    assert stub.Classify(request(image=data)).heatmap == b""


def test_an_elongated_image_is_marked_as_capped(stub) -> None:
    assert stub.Classify(request(image=png(30, 400, seed=2))).capped


def test_concurrent_calls_for_two_models_all_get_their_own_answers(stub) -> None:
    images = [png(30 + 3 * n, 61 - 2 * n, seed=n) for n in range(12)]
    requests = [request(image=image, model=("six", "three")[n % 2]) for n, image in enumerate(images)]
    alone = [without_timings(stub.Classify(each)) for each in requests]
    with ThreadPoolExecutor(12) as pool:
        assert list(map(without_timings, pool.map(stub.Classify, requests))) == alone
    assert len({answer.predictions[0].score for answer in alone}) == 12


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"image": b""}, "INVALID_ARGUMENT", "empty"),
        ({"image": b"x" * (32 * 2**20 + 1)}, "INVALID_ARGUMENT", "33554433 bytes are more than the limit of 33554432"),
        ({"model": "nine"}, "NOT_FOUND", "no model 'nine' is served. There are: six, three"),
        (
            {"model": ""},
            "NOT_FOUND",
            "a name is needed (`model`, or `--name` of prelunet classify). There are: six, three",
        ),
        ({"protocol": "twelve-crop"}, "INVALID_ARGUMENT", "Valid protocols: center, ten-crop, multi-scale"),
        ({"protocol": "dense-27"}, "INVALID_ARGUMENT", "scales from 28"),
        ({"scales": [27]}, "INVALID_ARGUMENT", "scales"),
        ({"scales": [0]}, "INVALID_ARGUMENT", "scales"),
        ({"scales": [2**32 - 1]}, "INVALID_ARGUMENT", "scales"),
        ({"scales": [40, 40]}, "INVALID_ARGUMENT", "40"),
        ({"scales": list(range(28, 61))}, "INVALID_ARGUMENT", "at most 32"),
        ({"scales": [40], "protocol": "dense-37"}, "INVALID_ARGUMENT", "dense-37"),
        ({"protocol": "dense-99999"}, "INVALID_ARGUMENT", "to 256"),
        ({"protocol": "center-99999"}, "INVALID_ARGUMENT", "scales from 28 to 448"),
        ({"protocol": "dense" + "".join(f"-{s}" for s in range(28, 61))}, "INVALID_ARGUMENT", "at most 32"),
        ({"protocol": "\0" * 200}, "INVALID_ARGUMENT", "unknown protocol"),
        ({"protocol": "\0" * 100_000}, "INVALID_ARGUMENT", "a protocol name of 100000 characters"),
        ({"scales": range(1, 500)}, "INVALID_ARGUMENT", "a protocol with 33 scales: give at most 32"),
        ({"scales": range(1, 100_000)}, "INVALID_ARGUMENT", "more than 1000 fields and numbers"),
        ({"top_k": 0}, "INVALID_ARGUMENT", "top_k is 0, but it must be 1 to 6"),
        ({"top_k": -1}, "INVALID_ARGUMENT", "top_k is -1"),
        ({"top_k": 7}, "INVALID_ARGUMENT", "1 to 6"),
        ({"top_k": 2**31 - 1}, "INVALID_ARGUMENT", "1 to 6"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_call_gets_an_error_that_explains_it_and_the_next_call_works(
    stub, changes: dict, code: str, text: str
) -> None:
    status, details = failure(stub.Classify, request(**changes))
    assert (status.name, text in details) == (code, True), details
    assert len(stub.Classify(request(top_k=6)).predictions) == 6


def test_top_k_defaults_to_five_or_to_all_classes(stub) -> None:
    assert len(stub.Classify(request()).predictions) == 5
    assert len(stub.Classify(request(model="three")).predictions) == 3


def test_a_server_at_its_limit_of_calls_refuses_more_but_answers_probes() -> None:
    session = GatedSession()
    with (
        running_server(server_limits=ServerLimits(max_calls=2), fake=session) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub, inference = pb_grpc.PreluNetServiceStub(channel), inference_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.Classify.future(pb.ClassifyRequest(image=png(40, 57), protocol="center")) for _ in range(2)]
        eventually(lambda: server.metric("prelunet_calls_now") == 2)
        for method, request in [(stub.Classify, pb.ClassifyRequest()), (stub.ListModels, pb.ListModelsRequest())]:
            status, details = failure(method, request)
            assert (status.name, details) == (
                "RESOURCE_EXHAUSTED",
                "the server already has 2 calls in flight. Try again later",
            )
        assert inference.ServerLive(inference_pb.ServerLiveRequest()).live
        assert inference.ServerReady(inference_pb.ServerReadyRequest()).ready
        assert inference.ModelReady(inference_pb.ModelReadyRequest(name="fake")).ready
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
        session.gate.set()
        assert all(call.result(30).predictions for call in calls)
        eventually(lambda: server.metric("prelunet_calls_now") == 0)
        assert stub.ListModels(pb.ListModelsRequest()).models


def test_models_are_listed_and_described(stub) -> None:
    listed = stub.ListModels(pb.ListModelsRequest()).models
    assert [(model.name, model.sha256) for model in listed] == [
        ("six", FakeSession().model_sha256),
        ("three", FakeSession(seed=1).model_sha256),
    ]
    model = stub.GetModel(pb.GetModelRequest(name="three")).model
    assert [entry.name for entry in model.classes] == ["class 0", "class 1", "class 2"]
    assert (model.architecture, model.activation, model.crop, model.max_side) == ("demo", "prelu", 28, 1024)
    assert (list(model.default_scales), model.canvas, model.checkpoint_sha256) == ([31, 44], "ragged", "c" * 64)
    assert failure(stub.GetModel, pb.GetModelRequest(name="nine"))[0] == grpc.StatusCode.NOT_FOUND


def test_reflection_names_the_services_and_describes_ours(channel) -> None:
    services = ProtoReflectionDescriptorDatabase(channel).get_services()
    method = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    (listed,) = method(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    assert [each.name for each in listed.list_services_response.service] == list(services)
    reflected = ProtoReflectionDescriptorDatabase(channel)
    assert {SERVICE, "grpc.health.v1.Health"} <= set(reflected.get_services())
    (service,) = reflected.FindFileContainingSymbol(SERVICE).service
    assert {method.name for method in service.method} == {
        "Classify",
        "ClassifyStream",
        "Evaluate",
        "ListModels",
        "GetModel",
    }


def test_no_slow_work_runs_on_the_event_loops_thread(monkeypatch) -> None:
    session, threads = FakeSession(), defaultdict(set)

    def record(owner, name: str) -> None:
        function = getattr(owner, name)

        def recorded(*arguments, **options):
            threads[name].add(threading.get_ident())
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, recorded)

    data = png(40, 57)
    for owner, name in [
        (Image, "open"),  # Pillow's own: decoding
        (decoding, "resized_of"),
        (session, "compute"),
        (classify, "average_views"),
        (overlay, "heat_maps"),
        (evaluation, "build_report"),
        (prelunet, "classify_response"),
        (prelunet, "report_message"),
    ]:
        record(owner, name)
    start = pb.EvaluateRequest(start=pb.EvaluateStart(dataset="photos"))
    labelled = [pb.LabelledImage(file=f"{label}.png", data=data, label=label) for label in range(3)]
    with running_server(six=session) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.PreluNetServiceStub(channel)
        assert stub.Classify(pb.ClassifyRequest(image=data, heatmap=True)).heatmap
        *_, last = stub.Evaluate(iter([start, *(pb.EvaluateRequest(image=image) for image in labelled)]))
    assert last.report.evaluated == 3
    assert len(threads) == 8
    assert [name for name, seen in threads.items() if server.loop_thread in seen] == []


def test_a_stopped_server_leaves_no_thread_of_its_models(monkeypatch) -> None:
    def of_models() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith(("compute", "decode"))}

    before = of_models()
    with running_server(six=FakeSession(), three=FakeSession(SMALL)) as server:
        with grpc.insecure_channel(server.address) as channel:
            assert pb_grpc.PreluNetServiceStub(channel).Classify(request()).predictions
        started = of_models() - before
        assert {thread.name.partition("-")[0] for thread in started} == {"compute", "decode"}
    assert [thread.name for thread in started if thread.is_alive()] == []


def test_a_model_that_does_not_run_is_refused_before_the_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeSession):
        def run(self, images, sizes):
            raise RuntimeError("no kernel")

    sessions = {"a.onnx": FakeSession(), "b.onnx": Broken()}

    def report(line: str) -> None:
        raise AssertionError(f"unexpected line: {line}")

    monkeypatch.setattr(models, "open_with_placement", lambda path, _placement: sessions[path.name])
    options = ServeOptions(parse_models(["a=a.onnx", "b=b.onnx"]), port=0)
    with pytest.raises(EnvironmentFault, match=r"^model b\.onnx loads but does not run on CPUExecution.*no kernel"):
        asyncio.run(serve(options, report))
    assert sessions["a.onnx"].calls == [(1, 28, 28, 3)], "each model should run once while it is loaded"


def test_an_expired_call_is_not_computed() -> None:
    session = GatedSession()
    with running_server(gated=session) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.PreluNetServiceStub(channel)
        first = stub.Classify.future(pb.ClassifyRequest(image=png(40, 57), protocol="center"))
        assert session.entered.wait(30)
        with pytest.raises(grpc.RpcError) as expired:
            stub.Classify(pb.ClassifyRequest(image=png(40, 57), protocol="dense-41"), timeout=0.5)
        assert expired.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: server.metric("prelunet_waiting_images", model="gated") == 1)  # the server has noticed
        session.gate.set()
        assert first.result(30).predictions
        assert stub.Classify(pb.ClassifyRequest(image=png(40, 57), protocol="dense-43")).predictions
    assert {shape[1] for shape in session.calls} == {28, 43}, "41, the expired call's scale, should not be computed"


def test_refused_images_do_not_stay_in_memory_until_a_garbage_collection() -> None:
    """Errors refer to frames by their tracebacks; if frames refer to the errors, such cycles keep the images alive."""
    bad, calls = b"x" * 2**20, range(20)
    start, labeled = pb.EvaluateStart(dataset="photos"), partial(pb.LabelledImage, data=bad, label=1)
    with running_server(six=FakeSession()) as server, grpc.insecure_channel(server.address) as channel:
        stub, inference = pb_grpc.PreluNetServiceStub(channel), inference_grpc.GRPCInferenceServiceStub(channel)
        ways: list[Callable[[], object]] = [
            lambda: [failure(stub.Classify, request(image=bad)) for _ in calls],
            lambda: [failure(inference.ModelInfer, infer_request([bad, bad])) for _ in calls],
            lambda: list(
                stub.ClassifyStream(pb.ClassifyStreamRequest(id=f"{n}", request=request(image=bad)) for n in calls)
            ),
            lambda: list(inference.ModelStreamInfer(infer_request([bad, bad]) for _ in calls)),
            lambda: list(
                stub.Evaluate(
                    iter(
                        [
                            pb.EvaluateRequest(start=start),
                            *(pb.EvaluateRequest(image=labeled(file=f"{n}")) for n in calls),
                        ]
                    )
                )
            ),
        ]
        for call in ways:
            gc.collect()
            gc.disable()
            tracemalloc.start()
            try:
                call()
                eventually(lambda: tracemalloc.get_traced_memory()[0] < 5 * len(bad))
            finally:
                tracemalloc.stop()
                gc.enable()


@pytest.mark.parametrize("streamed", [False, True])
def test_images_of_cancelled_calls_do_not_stay_in_memory_until_a_garbage_collection(streamed: bool) -> None:
    session, image = GatedSession(), png(600, 700)  # 1.3 MB
    with running_server(six=session) as server, grpc.insecure_channel(server.address) as channel:
        stub, images = pb_grpc.PreluNetServiceStub(channel), [request(image=image)] * 20
        first = stub.Classify.future(request(image=png(40, 57)))
        assert session.entered.wait(30)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            if streamed:
                named = (pb.ClassifyStreamRequest(id=f"{n}", request=each) for n, each in enumerate(images))
                calls = [stub.ClassifyStream(named)]
            else:
                calls = [stub.Classify.future(each) for each in images]
            eventually(lambda: server.metric("prelunet_waiting_images", model="six") == 21)
            while calls:
                calls.pop().cancel()
            eventually(lambda: tracemalloc.get_traced_memory()[0] < 5 * len(image))
        finally:
            tracemalloc.stop()
            gc.enable()
            session.gate.set()
        assert first.result(30).predictions


def test_model_options_are_names_and_files() -> None:
    assert parse_models(["a=x=y.onnx", "b-2.1=z.onnx", "there/c-3.onnx"]) == (
        ModelFile("a", Path("x=y.onnx")),
        ModelFile("b-2.1", Path("z.onnx")),
        ModelFile("c-3", Path("there/c-3.onnx")),
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["-.onnx"], "a name and a file"),
        (["=x.onnx"], "a name and a file"),
        (["a="], "a name and a file"),
        (["a/b=x.onnx"], "letters, digits"),
        (["a=x.onnx", "b=y.onnx", "a=z.onnx"], "--model a=…: the name is given twice"),
    ],
)
def test_an_invalid_model_option_is_refused(options: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        parse_models(options)


def test_committed_messages_are_those_of_the_proto_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools (extra dev)")
    root = Path(__file__).parents[3]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    file = "prelunet/evaluator/pb/prelunet/v1/prelunet.proto"
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=prelunet/evaluator/pb=proto"]
    subprocess.run([*protoc, *outputs, file], cwd=root, check=True)
    made = sorted((tmp_path / file).parent.iterdir())
    assert len(made) == 3
    for path in made:
        committed = root / "src" / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), f"{committed} is stale: run tools/generate_proto.sh"


def test_every_method_message_and_field_of_our_proto_is_commented() -> None:
    lines = (Path(__file__).parents[3] / "proto" / "prelunet" / "v1" / "prelunet.proto").read_text().splitlines()
    defined = re.compile(r"\s*(message|service|rpc|oneof|(optional |repeated )?[\w.<>, ]+ \w+ = \d+;)")
    found = [number for number, line in enumerate(lines) if defined.match(line)]
    assert len(found) > 200
    assert [lines[number] for number in found if not re.match(r"\s*// \S", lines[number - 1])] == []
