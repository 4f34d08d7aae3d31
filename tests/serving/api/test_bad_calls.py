"""Every row of tests/serving/bad-calls.md, and that the next call works."""

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec.structs import replace

from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.errors import OutOfMemory
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.inference import inference_pb2_grpc as oip_grpc
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.protocols import build_protocol
from tests.helpers.bad_calls_page import documented
from tests.helpers.fakes import FakeSession, fake_contract
from tests.imaging.test_decode import ACCEPTED, REFUSED
from tests.serving.api.bad_calls import (
    CLASSIFY,
    INFER,
    MANY_INPUTS,
    MANY_SCALES,
    MATRIX,
    MORE_OVER_OIP,
    OVER_PRELUNET,
    RUBBISH,
    Call,
    classify,
    infer,
    of_image,
    outcome_of,
)
from tests.serving.api.inference_calls import IMAGE, infer_request, scores_in
from tests.serving.serving_harness import png, running_server

# pytest resets the warnings filter that evaluator.imaging.decode sets on import.
pytestmark = pytest.mark.filterwarnings(r"ignore::Warning:PIL\.")

DATA = Path(__file__).parents[2] / "data" / "hostile"
EVALUATE = "/prelunet.v1.PreluNetService/Evaluate"
BESIDE_OTHERS = documented("Open Inference Protocol, beside three other servers")
OVER_OIP = documented("Open Inference Protocol, more")
OVER_OURS = documented("prelunet.v1")
IMAGES = documented("Images")
FAULTS = documented("Faults that are not the caller's")


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    sessions = {"six": FakeSession(), "three": FakeSession(fake_contract(classes=3), seed=1)}
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with running_server(**sessions) as server, grpc.insecure_channel(server.address, options) as channel:
        yield channel


@pytest.fixture(scope="module")
def right_scores() -> np.ndarray:
    session = FakeSession()
    (alone,) = classify_images(session, [decode_rgb(IMAGE)], build_protocol("center", session.contract))
    return alone.scores


@pytest.fixture
def works_afterwards(channel: grpc.Channel, right_scores: np.ndarray) -> Iterator[None]:
    """Assert that after the test the server is healthy and both protocols answer a good call correctly."""
    yield
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    answer = oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer(infer_request(), timeout=60)
    np.testing.assert_allclose(scores_in(answer)[0], right_scores, rtol=1e-6)  # einsum may add in another order
    ours = pb_grpc.PreluNetServiceStub(channel).Classify(
        pb.ClassifyRequest(image=IMAGE, model="six", protocol="center"), timeout=60
    )
    np.testing.assert_allclose(ours.predictions[0].score, right_scores.max(), rtol=1e-6)


def check(call: Call, channel: grpc.Channel, expected: str) -> str:
    """Assert the status of a call, and that an error has a text that reveals nothing internal; return that text."""
    outcome, text = outcome_of(call, channel)
    assert outcome == expected, text
    assert bool(text) is not expected.startswith("OK"), text
    assert not re.search(r"0x[0-9a-f]{6}|(^|\s)/|Traceback|\.onnx\b(?! *\. *$)", text.replace("NAME=MODEL.onnx", "")), (
        text
    )
    return text


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.usefixtures("works_afterwards")
def test_the_22_calls_get_the_documented_status_and_the_next_call_works(channel, name: str) -> None:
    check(MATRIX[name], channel, BESIDE_OTHERS[name][0])


@pytest.mark.parametrize("name", MORE_OVER_OIP)
@pytest.mark.usefixtures("works_afterwards")
def test_a_bad_call_of_the_open_inference_protocol_gets_the_documented_status_and_the_next_call_works(
    channel, name: str
) -> None:
    check(MORE_OVER_OIP[name], channel, OVER_OIP[name][0])


@pytest.mark.parametrize("name", OVER_PRELUNET)
@pytest.mark.usefixtures("works_afterwards")
def test_a_bad_call_of_our_protocol_gets_the_documented_status_and_the_next_call_works(channel, name: str) -> None:
    check(OVER_PRELUNET[name], channel, OVER_OURS[name][0])


@pytest.mark.parametrize("what", IMAGES)
@pytest.mark.parametrize("column", ["Open Inference Protocol", "prelunet.v1"])
@pytest.mark.usefixtures("works_afterwards")
def test_an_odd_image_gets_the_documented_status_and_the_next_call_works(channel, what: str, column: str) -> None:
    file, *statuses = IMAGES[what]
    call = of_image((DATA / file).read_bytes())[column]
    check(call, channel, statuses[["Open Inference Protocol", "prelunet.v1"].index(column)])


def test_both_protocols_accept_and_refuse_the_other_hostile_files_as_decoding_does(channel) -> None:
    listed = {row[0] for row in IMAGES.values()}
    for name in sorted({*ACCEPTED, *REFUSED} - listed):
        for column, call in of_image((DATA / name).read_bytes()).items():
            text = check(call, channel, "OK" if name in ACCEPTED else "INVALID_ARGUMENT")
            assert REFUSED.get(name, "") in text, (name, column)


def test_the_page_lists_exactly_these_calls() -> None:
    assert list(BESIDE_OTHERS) == list(MATRIX)
    assert len(MATRIX) == 22
    assert list(OVER_OIP) == list(MORE_OVER_OIP)
    assert list(OVER_OURS) == list(OVER_PRELUNET)
    assert list(FAULTS) == list(PLANTED)


class BrokenSession(FakeSession):
    """A fake that fails for canvases of one width."""

    def __init__(self, fault: Exception | None) -> None:
        super().__init__()
        self._fault = fault

    def compute(self, staged):
        outputs = super().compute(staged)
        if staged[0].shape[2] != 99:
            return outputs
        if self._fault is not None:
            raise self._fault
        return replace(outputs, scores=outputs.scores * np.nan)


PLANTED: dict[str, Exception | None] = {
    "a mistake of ours (ZeroDivisionError)": ZeroDivisionError("/secret/six.onnx: division by zero"),
    "the device has too little memory": OutOfMemory("/secret/six.onnx: failed to allocate 7 GB"),
    "the model gives no numbers (NaN)": None,
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_gets_its_status_in_both_protocols_and_the_next_call_works(caplog, fault: str) -> None:
    def calls(width: int) -> dict[str, Call]:
        image, options = png(40, width), {"protocol": "dense-40", "mirror": False}
        return {"OIP": infer(images=[image], values=options), "prelunet.v1": classify(image=image, **options)}

    session = BrokenSession(PLANTED[fault])
    with running_server(six=session) as server, grpc.insecure_channel(server.address) as channel:
        for name, call in calls(99).items():
            with caplog.at_level(logging.ERROR):
                outcome, text = outcome_of(call, channel)
            assert outcome == FAULTS[fault][0], (name, text)
            assert not re.search(r"/secret|\.onnx|division|7 GB|NaN|Traceback", text), text
            incident = re.search(r"id ([0-9a-f]{12})", text)
            assert incident is not None, text
            assert incident[1] in caplog.text
            assert outcome_of(calls(55)[name], channel) == ("OK", "")


@pytest.mark.usefixtures("works_afterwards")
def test_malformed_bytes_end_a_stream_of_both_protocols_with_invalid_argument(channel) -> None:
    for method in (INFER.replace("ModelInfer", "ModelStreamInfer"), CLASSIFY + "Stream", EVALUATE):
        malformed = channel.stream_stream(method)(iter([RUBBISH]), timeout=60)
        outcome, text = outcome_of(lambda _, malformed=malformed: list(malformed), channel)
        assert (outcome, "cannot be decoded as a message of this method" in text) == ("INVALID_ARGUMENT", True), (
            method,
            text,
        )


@pytest.mark.parametrize("place", [0, 1, 3])
def test_the_error_of_one_bad_image_names_its_index(channel, place: int) -> None:
    images = [IMAGE] * 4
    images[place] = (DATA / "cut-in-scan.jpg").read_bytes()
    outcome, text = outcome_of(
        lambda channel: oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer(infer_request(images), timeout=60),
        channel,
    )
    assert (outcome, text.startswith(f"images[{place}]: "), "truncated" in text) == ("INVALID_ARGUMENT", True, True), (
        text
    )


def test_health_is_answered_while_many_messages_with_too_many_parts_arrive(channel) -> None:
    check_health = health_pb2_grpc.HealthStub(channel).Check
    with ThreadPoolExecutor(4) as pool:
        sent = [(CLASSIFY, MANY_SCALES), (INFER, MANY_INPUTS)] * 4
        calls = [pool.submit(channel.unary_unary(method), data, timeout=60) for method, data in sent]
        while not all(call.done() for call in calls):
            assert check_health(health_pb2.HealthCheckRequest(), timeout=30).status == 1
        for call in calls:
            error = call.exception()
            assert isinstance(error, grpc.RpcError)
            assert (error.code(), "more than 1000 fields" in error.details()) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                True,
            )


def test_a_model_that_is_not_served_is_not_ready(channel) -> None:
    ready = oip_grpc.GRPCInferenceServiceStub(channel).ModelReady
    requests = [("six", ""), ("three", "1"), ("six", "2"), ("nine", ""), ("", "")]
    answers = [ready(oip.ModelReadyRequest(name=name, version=version), timeout=60).ready for name, version in requests]
    assert answers == [True, True, False, False, False]
