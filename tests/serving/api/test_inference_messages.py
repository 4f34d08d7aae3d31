"""Parsing of requests of the Open Inference Protocol, and unit tests of parts of its service."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from prelunet.evaluator.errors import ImageError, UsageError
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.pb.inference import inference_pb2 as pb
from prelunet.evaluator.serving.api import inference as grpc_inference
from prelunet.evaluator.serving.inference import CheckedRequest, check_request, model_statistics
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import ModelFile
from tests.helpers.fakes import FakeSession
from tests.serving.api.inference_calls import IMAGE, image_input, infer_request, parameters, raw, scores_output

Check = Callable[[pb.ModelInferRequest], CheckedRequest]


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """Read a message, and check it for a model of six classes."""
    models = Models([(ModelFile("six", Path("six.onnx")), FakeSession())], DecodeLimits())
    yield lambda request: check_request(grpc_inference.infer_request(request), models.get("six"))
    models.close()


def test_statistics_are_in_nanoseconds_and_each_in_its_field() -> None:
    metrics = Metrics()
    for stage, seconds in {"queue": 0.25, "decode": 0.5, "compute": 1.0, "average": 0.125}.items():
        for times in (1, 2):
            metrics.stage_seconds.labels("six", stage).observe(times * seconds)
    for seconds in (4.0, 8.0):
        metrics.request_seconds.labels("six").observe(seconds)
    metrics.failed_seconds.labels("six").observe(16.0)
    for _ in range(3):
        metrics.batch_seconds.labels("six").observe(0.5)
    metrics.last_answer.labels("six").set(1.7e9)
    metrics.request_seconds.labels("other").observe(99.0)
    statistics = model_statistics("six", 1, metrics)
    assert (statistics.inference_count, statistics.execution_count, statistics.last_inference) == (
        2,
        3,
        1_700_000_000_000,
    )
    parts = {
        name: (part["count"], part["ns"] / 1e9)
        for name, part in msgspec.to_builtins(statistics.inference_stats).items()
    }
    assert parts == {
        "success": (2, 12.0),
        "fail": (1, 16.0),
        "queue": (2, 0.75),
        "compute_input": (2, 1.5),
        "compute_infer": (2, 3.0),
        "compute_output": (2, 0.375),
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"inputs": [image_input(name="pixels")]},
            "the model has no input 'pixels'; this model takes one input: 'images'",
        ),
        ({"inputs": [image_input([4, 4])]}, "input 'images' has shape [4, 4]"),
        ({"inputs": [image_input([2, 3, 4])]}, "shape [2, 3, 4]; this model takes one input: 'images', datatype BYTES"),
        ({"raw_input_contents": [raw([IMAGE])[:-1]]}, "ends within images[0], but its shape declares 1"),
        ({"raw_input_contents": [raw([IMAGE]) + b"xyz"]}, "has 3 bytes after images[0]"),
        ({"values": {"sequenced": 3}}, "unknown field `sequenced`. Allowed: protocol, scales, "),
        (
            {"inputs": [image_input(parameters=parameters({"shared_memory_region": "r"}))]},
            "unknown field `shared_memory_region`. Allowed: binary_data_size, content_type",
        ),
        (
            {"inputs": [image_input(parameters=parameters({"content_type": "np"}))]},
            "Expected `str` matching regex '^(base64|str)$' - at `$.content_type`",
        ),
        ({"values": {"content_type": "str"}}, "are not base64; send each image file in base64, or as binary data"),
        (
            {"outputs": [scores_output(shared_memory_offset=3)]},
            "unknown field `shared_memory_offset`. Allowed: classification, binary_data",
        ),
        ({"outputs": [scores_output("logits")]}, "the model has no output 'logits'. Its only output: scores"),
        ({"outputs": [scores_output(), scores_output()]}, "requested 2 times; request it once"),
        ({"raw_input_contents": []}, "has no elements; send the images in `raw_input_contents`"),
        ({"values": {"scales": "256;384"}}, "1 to 32 comma-separated integers in pixels, as in '256,384,480'"),
        (
            {"values": {"mirror": "yes"}},
            "the parameters of the request are not valid: Expected `bool`, got `str` - at `$.mirror`",
        ),
        ({"values": {"protocol": 1.5}}, "Expected `str`, got `float` - at `$.protocol`"),
        ({"values": {"timeout": -5}}, "Expected `int` >= 0 - at `$.timeout`"),
        (
            {"outputs": [scores_output(classification=7)]},
            "'classification' is 7, but this model has 6 classes; give 1 to 6",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_request_is_explained(check: Check, changes: dict, text: str) -> None:
    with pytest.raises((UsageError, ImageError)) as refused:
        check(infer_request(**changes))
    assert text in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": [image_input(name="n" * 10_000)]},
        {"inputs": [image_input(datatype="n" * 10_000)]},
        {"outputs": [scores_output("n" * 10_000)]},
        {"values": {"n" * 10_000: True}},
    ],
    ids=["input", "datatype", "output", "parameter"],
)
def test_long_text_from_a_caller_is_truncated_in_the_error(check: Check, changes: dict) -> None:
    with pytest.raises(UsageError) as refused:
        check(infer_request(**changes))
    assert "nnn…" in str(refused.value)
    assert len(str(refused.value)) < 400


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=64))
def test_raw_contents_are_split_into_their_images(check: Check, images: list[bytes]) -> None:
    assert check(infer_request(images)).images == tuple(images)


MESSAGE = infer_request(
    [b"first", b""], id="7", outputs=[scores_output(classification=2)], values={"scales": "31,44", "timeout": 5}
).SerializeToString()


@settings(max_examples=500)
@given(st.lists(st.tuples(st.integers(0, len(MESSAGE)), st.integers(0, 3), st.binary(max_size=3)), max_size=6))
def test_a_damaged_message_is_parsed_or_refused_with_a_usage_error(
    check: Check, damages: list[tuple[int, int, bytes]]
) -> None:
    data = bytearray(MESSAGE)
    for place, removed, put in damages:
        data[place : place + removed] = put
    try:
        request = pb.ModelInferRequest.FromString(bytes(data))
    except DecodeError:
        return
    try:
        parsed = check(request)
    except UsageError:
        return
    assert 1 <= len(parsed.images) <= 64


def test_parameters_that_change_nothing_over_grpc_are_accepted(check: Check) -> None:
    tensor = image_input(parameters=parameters({"binary_data_size": len(IMAGE) + 4}))
    values = {"protocol": "center", "binary_data_output": False}
    asked = check(infer_request(values=values, inputs=[tensor], outputs=[scores_output(binary_data=True)]))
    assert (asked.images, asked.top) == ((IMAGE,), None)


@pytest.mark.parametrize("of_input", [True, False])
@pytest.mark.parametrize("content_type", ["base64", "str"])
def test_images_with_a_content_type_are_decoded_from_base64(check: Check, content_type: str, of_input: bool) -> None:
    given = {"content_type": content_type}
    tensor = image_input(parameters=parameters(given if of_input else {}))
    request = infer_request([base64.b64encode(IMAGE)], inputs=[tensor], values={} if of_input else given)
    assert check(request).images == (IMAGE,)


def test_a_parameter_without_a_value_is_as_if_it_were_not_there(check: Check) -> None:
    request = infer_request()
    expected = check(request)
    request.parameters["mirror"].SetInParent()
    assert check(request) == expected


def test_unsigned_parameters_are_accepted_as_integers(check: Check) -> None:
    request = infer_request(outputs=[scores_output()])
    request.parameters["timeout"].uint64_param = 2_500_000
    request.outputs[0].parameters["classification"].uint64_param = 2
    parsed = check(request)
    assert (parsed.timeout, parsed.top) == (2.5, 2)
    assert parameters({"mirror": True})["mirror"].bool_param  # a bool is not treated as a number here
