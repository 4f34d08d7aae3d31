"""The Open Inference Protocol compared with the model's own answers, using only its messages."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.pb.inference import inference_pb2 as pb
from prelunet.evaluator.pb.inference import inference_pb2_grpc as pb_grpc
from prelunet.evaluator.protocols import ProtocolOverrides, build_protocol
from prelunet.evaluator.serving import inference
from prelunet.evaluator.serving.api import inference as grpc_inference
from prelunet.evaluator.serving.api.inference import SERVICE, InferenceServicer
from prelunet.evaluator.serving.data_plane import DataPlane
from prelunet.evaluator.serving.options import QueueOptions
from tests.helpers.fakes import FakeSession, fake_contract
from tests.serving.api.bad_calls import large_bmp
from tests.serving.api.inference_calls import IMAGE, image_input, infer_request, raw, scores_in, scores_output, texts_in
from tests.serving.serving_harness import GatedSession, Referable, eventually, png, running_server

HOSTILE = Path(__file__).parents[2] / "data" / "hostile"
IMAGES = [png(40, 57, seed=1), png(33, 31, seed=2), png(70, 45, seed=3)]
LARGE = large_bmp()
SMALL = fake_contract(classes=3, default_scales=(31, 44))


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    sessions = {"six": FakeSession(), "three": FakeSession(SMALL, seed=1)}
    with running_server(**sessions) as server, grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return pb_grpc.GRPCInferenceServiceStub(channel)


def alone(images: Sequence[bytes], protocol: str, session: FakeSession | None = None, **changes: Any) -> np.ndarray:
    """Return the scores of each image classified alone, float32 (N, classes)."""
    session = session or FakeSession()
    requested = build_protocol(protocol, session.contract, ProtocolOverrides(**changes))
    return np.stack([classify_images(session, [decode_rgb(image)], requested)[0].scores for image in images])


def same(scores: np.ndarray, expected: np.ndarray) -> None:
    """Assert equal scores; in another batch the fake's einsum may add in another order."""
    assert scores.shape == expected.shape
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_image_of_a_request_gets_the_scores_it_gets_alone(stub, count: int) -> None:
    answer = stub.ModelInfer(infer_request(IMAGES[:count], values={"protocol": "ten-crop"}), timeout=60)
    same(scores_in(answer), alone(IMAGES[:count], "ten-crop"))
    assert list(answer.outputs[0].shape) == [count, 6]


def test_shape_n_and_shape_n_1_mean_the_same(stub) -> None:
    flat = stub.ModelInfer(infer_request(IMAGES), timeout=60)
    column = stub.ModelInfer(infer_request(IMAGES, inputs=[image_input([3, 1])]), timeout=60)
    same(scores_in(column), scores_in(flat))


def test_typed_requests_get_typed_answers_and_raw_requests_raw_ones(stub) -> None:
    typed = image_input([3], contents=pb.InferTensorContents(bytes_contents=IMAGES))
    for outputs in ([], [scores_output(classification=2)]):
        of_raw = stub.ModelInfer(infer_request(IMAGES, outputs=outputs), timeout=60)
        of_typed = stub.ModelInfer(infer_request(inputs=[typed], raw_input_contents=[], outputs=outputs), timeout=60)
        assert (len(of_raw.raw_output_contents), of_raw.outputs[0].HasField("contents")) == (1, False)
        assert (len(of_typed.raw_output_contents), of_typed.outputs[0].HasField("contents")) == (0, True)
        if outputs:
            assert texts_in(of_typed) == texts_in(of_raw)
        else:
            same(scores_in(of_typed), scores_in(of_raw))


def test_without_parameters_the_protocol_is_multi_scale(stub) -> None:
    answer = stub.ModelInfer(infer_request(IMAGES, model_name="three", values={}), timeout=60)
    same(scores_in(answer), alone(IMAGES, "multi-scale", FakeSession(SMALL, seed=1)))


@pytest.mark.parametrize(
    ("values", "protocol", "changes"),
    [
        ({"protocol": "dense-37"}, "dense-37", {}),
        ({"scales": "31,50"}, "multi-scale", {"scales": (31, 50)}),
        ({"scales": 45}, "multi-scale", {"scales": (45,)}),
        ({"protocol": "ten-crop", "scales": "40"}, "ten-crop", {"scales": (40,)}),
        ({"protocol": "dense-37", "mirror": False}, "dense-37", {"mirror": False}),
        ({"protocol": "center", "mirror": True}, "center", {"mirror": True}),
        ({"protocol": "center", "timeout": 0, "priority": 0}, "center", {}),
        ({"protocol": "center", "timeout": 2**62}, "center", {}),
        ({"protocol": "center", "triton_enable_empty_final_response": True}, "center", {}),
    ],
    ids=str,
)
def test_parameters_choose_the_protocol(stub, values: dict, protocol: str, changes: dict) -> None:
    same(
        scores_in(stub.ModelInfer(infer_request(IMAGES, values=values), timeout=60)), alone(IMAGES, protocol, **changes)
    )


def test_the_parameter_apply_exif_applies_the_exif_orientation(stub) -> None:
    image = (HOSTILE / "exif-rotated.png").read_bytes()
    plain, turned = [
        scores_in(
            stub.ModelInfer(infer_request([image], values={"protocol": "center", "apply_exif": given}), timeout=60)
        )
        for given in (False, True)
    ]
    session = FakeSession()
    protocol = build_protocol("center", session.contract)
    for got, obeyed in ((plain, False), (turned, True)):
        (expected,) = classify_images(session, [decode_rgb(image, apply_exif=obeyed)], protocol)
        same(got[0], expected.scores)
    assert np.abs(turned - plain).max() > 1e-3, "the image should distinguish the two"


@pytest.mark.parametrize("top", [1, 4, 6])
def test_classification_returns_the_best_classes_in_tritons_format(stub, top: int) -> None:
    answer = stub.ModelInfer(infer_request(IMAGES, outputs=[scores_output(classification=top)]), timeout=60)
    assert list(answer.outputs[0].shape) == [3, top]
    texts, scores = texts_in(answer), alone(IMAGES, "center")
    for row, of_image in enumerate(scores):
        fields = [text.split(":") for text in texts[row * top : (row + 1) * top]]
        order = sorted(range(6), key=lambda index: (-of_image[index], index))[:top]
        assert [int(index) for _, index, _ in fields] == order
        assert [name for *_, name in fields] == [f"class {index}" for index in order]
        # Answers have six decimals, and the fake may add in another order.
        np.testing.assert_allclose([float(score) for score, *_ in fields], of_image[order], atol=2e-6)
        assert all(len(score.partition(".")[2]) == 6 for score, *_ in fields)


def test_the_answer_has_model_version_and_request_id(stub) -> None:
    answer = stub.ModelInfer(infer_request(id="photo 7", model_version="1"), timeout=60)
    assert (answer.model_name, answer.model_version, answer.id) == ("six", "1", "photo 7")
    assert stub.ModelInfer(infer_request(), timeout=60).id == ""


def test_large_messages_are_parsed_and_long_answers_built_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing 32 MB takes 50 ms, which should not delay other callers."""
    threads: dict[tuple[str, bool], int] = {}

    def record(module: Any, name: str, is_large: Callable[..., bool]) -> None:
        function = getattr(module, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            threads[name, is_large(*arguments)] = threading.get_ident()
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, recorded)

    record(inference, "check_request", lambda request, _: len(request.tensor.elements(request.tensor.shape[0])) > 1)
    record(grpc_inference, "infer_response", lambda answer: len(answer.scores) > 1)
    session = FakeSession(fake_contract(classes=300))
    with running_server(six=session) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(infer_request(), timeout=60)
        stub.ModelInfer(infer_request([LARGE, *IMAGES]), timeout=60)
        in_loop = {what for what, thread in threads.items() if thread == server.loop_thread}
    assert in_loop == {("check_request", False), ("infer_response", False)}
    assert len(threads) == 4


def test_64_images_are_accepted(stub) -> None:
    images = [png(28 + n % 5, 30, seed=n) for n in range(64)]
    same(scores_in(stub.ModelInfer(infer_request(images), timeout=60)), alone(images, "center"))


def test_concurrent_requests_for_two_models_all_get_their_own_scores(stub) -> None:
    requests = [infer_request([png(30 + n, 61 - n, seed=n)] * 2, model_name=("six", "three")[n % 2]) for n in range(12)]
    one_by_one = [scores_in(stub.ModelInfer(request, timeout=60)) for request in requests]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda request: scores_in(stub.ModelInfer(request, timeout=60)), requests))
    for got, expected in zip(together, one_by_one, strict=True):
        same(got, expected)


def test_a_request_with_many_images_is_admitted_entirely_or_not_at_all() -> None:
    session = GatedSession()
    queue = QueueOptions(max_views=3)
    with running_server(queue=queue, six=session) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        first = stub.ModelInfer.future(infer_request(), timeout=60)  # one view
        assert session.entered.wait(60)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(infer_request(IMAGES), timeout=60)  # three views, room for two
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        second = stub.ModelInfer.future(infer_request(IMAGES[:2]), timeout=60)
        with pytest.raises(grpc.FutureTimeoutError):
            second.result(timeout=0.05)  # it waits: a refusal would have arrived at once
        session.gate.set()
        same(scores_in(first.result()), alone([IMAGE], "center"))
        same(scores_in(second.result()), alone(IMAGES[:2], "center"))
    assert sum(shape[0] for shape in session.calls) == 3, "no view of the refused request was computed"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_unanswered_request_is_held_only_as_its_images(streamed: bool) -> None:
    """The message holds a second copy of them."""
    session = GatedSession()
    messages = []

    async def requests() -> AsyncIterator[Referable]:
        for _ in range(2):
            request = Referable(infer_request())
            messages.append(weakref.ref(request))
            yield request
            del request  # the next request is read at once
        await asyncio.to_thread(session.gate.wait, 60)

    async def scenario(servicer: InferenceServicer) -> None:
        answers = asyncio.Queue[pb.ModelStreamInferResponse]()
        context = SimpleNamespace(time_remaining=lambda: None, peer=lambda: "me", write=answers.put)
        if streamed:
            answered = asyncio.ensure_future(servicer.ModelStreamInfer(requests(), context))
        else:
            request = Referable(infer_request())
            messages.append(weakref.ref(request))
            answered = asyncio.ensure_future(servicer.ModelInfer(request, context))
            del request
        await asyncio.to_thread(session.entered.wait, 60)
        # The second request may not be in the queue yet; its message is freed while its answer is pending.
        kept = [None] * (2 if streamed else 1)
        await asyncio.to_thread(eventually, lambda: [message() for message in messages] == kept)
        session.gate.set()
        answer = await answered
        assert answers.qsize() == 2 if streamed else answer

    with running_server(six=session) as server:
        asyncio.run(scenario(InferenceServicer(DataPlane(server.models))))


def test_the_bytes_of_all_images_of_a_request_count_together() -> None:
    session = GatedSession()
    queue = QueueOptions(queue_bytes=3 * len(IMAGE))
    with running_server(queue=queue, six=session) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        first = stub.ModelInfer.future(infer_request(), timeout=60)
        assert session.entered.wait(60)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(infer_request([IMAGE] * 3), timeout=60)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        second = stub.ModelInfer.future(infer_request([IMAGE] * 2), timeout=60)
        session.gate.set()
        same(scores_in(second.result()), alone([IMAGE] * 2, "center"))
        assert first.result()


def test_an_image_not_started_before_its_timeout_is_never_computed() -> None:
    session = GatedSession()
    with running_server(six=session) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        first = stub.ModelInfer.future(infer_request(), timeout=60)
        assert session.entered.wait(60)
        late = stub.ModelInfer.future(infer_request(values={"protocol": "center", "timeout": 20_000}), timeout=60)
        assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        session.gate.set()
        same(scores_in(first.result()), alone([IMAGE], "center"))
    assert len(session.calls) == 1


def test_metadata_and_configuration_of_a_model_agree(stub) -> None:
    metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name="three", version="1"), timeout=60)
    config = stub.ModelConfig(pb.ModelConfigRequest(name="three"), timeout=60).config
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("three", ["1"], "prelunet_onnx")
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("images", "BYTES", [-1, 1])]
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [("scores", "FP32", [-1, 3])]
    # Triton's rule: with max_batch_size above 0, the dimensions exclude the batch dimension of the metadata.
    assert [(t.name, t.data_type, list(t.dims)) for t in config.input] == [("images", pb.TYPE_STRING, [1])]
    assert [(t.name, t.data_type, list(t.dims)) for t in config.output] == [("scores", pb.TYPE_FP32, [3])]
    assert (config.name, config.platform, config.backend) == ("three", "prelunet_onnx", "prelunet")
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (64, True)
    session = FakeSession(SMALL, seed=1)
    assert {name: value.string_value for name, value in config.parameters.items()} == {
        "sha256": session.model_sha256,
        "architecture": "demo",
        "provider": "CPUExecutionProvider",
        "precision": "fp32",
    }


def test_the_server_is_live_and_ready_and_lists_its_models(stub) -> None:
    assert stub.ServerLive(pb.ServerLiveRequest(), timeout=60).live
    assert stub.ServerReady(pb.ServerReadyRequest(), timeout=60).ready
    metadata = stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=60)
    assert metadata.name == "prelunet"
    assert {"classification", "model_configuration", "statistics"} <= set(metadata.extensions)
    listed = stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True), timeout=60).models
    assert [(model.name, model.version, model.state, model.reason) for model in listed] == [
        ("six", "1", "READY", ""),
        ("three", "1", "READY", ""),
    ]


def test_a_server_that_accepts_no_new_work_is_live_but_not_ready() -> None:
    state = {"ready": True}
    with running_server(six=FakeSession()) as server:
        servicer = InferenceServicer(DataPlane(server.models, ready=lambda: state["ready"]))

        async def readiness() -> tuple[bool, bool, bool, list[tuple[str, str]]]:
            index = await servicer.RepositoryIndex(pb.RepositoryIndexRequest(), None)
            return (
                (await servicer.ServerLive(pb.ServerLiveRequest(), None)).live,
                (await servicer.ServerReady(pb.ServerReadyRequest(), None)).ready,
                (await servicer.ModelReady(pb.ModelReadyRequest(name="six"), None)).ready,
                [(model.state, model.reason) for model in index.models],
            )

        assert asyncio.run(readiness()) == (True, True, True, [("READY", "")])
        state["ready"] = False
        assert asyncio.run(readiness()) == (True, False, False, [("UNAVAILABLE", "the server accepts no new work")])
        only_ready = servicer.RepositoryIndex(pb.RepositoryIndexRequest(ready=True), None)
        assert list(asyncio.run(only_ready).models) == []


def test_health_knows_the_service(channel) -> None:
    check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
    assert check.status == health_pb2.HealthCheckResponse.SERVING


def test_statistics_count_every_image_once() -> None:
    sessions = {"six": FakeSession(), "three": FakeSession(SMALL)}
    with running_server(**sessions) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)

        def statistics(name: str) -> pb.ModelStatistics:
            (of_model,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name=name), timeout=60).model_stats
            return of_model

        before = statistics("six")
        assert (before.inference_count, before.execution_count, before.last_inference) == (0, 0, 0)
        stub.ModelInfer(infer_request(IMAGES), timeout=60)
        stub.ModelInfer(infer_request(), timeout=60)
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(infer_request([b"no image"]), timeout=60)
        after, stats = statistics("six"), statistics("six").inference_stats
        assert (after.name, after.version, after.inference_count) == ("six", "1", 4)
        assert 2 <= after.execution_count <= 4
        assert after.last_inference > 1.6e12  # milliseconds since 1970, not seconds
        assert (stats.success.count, stats.fail.count) == (4, 1)
        for part in (stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output):
            assert part.count == 4
            assert 0 < part.ns < stats.success.ns
        parts = stats.queue.ns + stats.compute_input.ns + stats.compute_infer.ns
        assert 1e5 < parts <= stats.success.ns < 60e9, "in nanoseconds, and the total includes the parts"
        assert statistics("three").inference_count == 0
        every = stub.ModelStatistics(pb.ModelStatisticsRequest(), timeout=60).model_stats
        assert [model.name for model in every] == ["six", "three"]


def test_a_stream_answers_in_order_and_continues_after_an_error(stub) -> None:
    requests = [infer_request([image], id=str(place)) for place, image in enumerate(IMAGES * 20)]
    requests[7].raw_input_contents[0] = raw([b"no image"])
    requests[9].model_name = "nine"
    answers = list(stub.ModelStreamInfer(iter(requests), timeout=60))
    assert [answer.infer_response.id for answer in answers] == [str(place) for place in range(60)]
    failed = {place: answer.error_message for place, answer in enumerate(answers) if answer.error_message}
    assert list(failed) == [7, 9]
    assert failed[7].startswith("images[0]: ")
    assert failed[9].startswith("no model 'nine' is served")
    expected = alone(IMAGES, "center")
    for place, answer in enumerate(answers):
        if place not in failed:
            same(scores_in(answer.infer_response)[0], expected[place % 3])
            assert answer.infer_response.parameters["triton_final_response"].bool_param


def test_waiting_requests_of_a_stream_are_dropped_when_its_caller_leaves() -> None:
    session = GatedSession()
    with running_server(six=session) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)

        def waiting() -> float | None:
            return server.models.metrics.registry.get_sample_value("prelunet_waiting_images", {"model": "six"})

        go_on = threading.Event()

        def requests() -> Iterator[pb.ModelInferRequest]:
            yield infer_request(IMAGES[:1])
            assert session.entered.wait(60)  # so that the others do not share its batch
            yield infer_request(IMAGES[1:2])
            yield infer_request(IMAGES[2:])
            go_on.wait(60)

        stream = stub.ModelStreamInfer(requests(), timeout=60)
        eventually(lambda: waiting() == 3)
        stream.cancel()
        go_on.set()
        eventually(lambda: waiting() == 0)
        session.gate.set()
        same(scores_in(stub.ModelInfer(infer_request(), timeout=60)), alone([IMAGE], "center"))
    assert [shape[0] for shape in session.calls] == [1, 1]
