"""Messages with too many parts, and no others, are refused before they are decoded."""

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message

from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.serving.api.front import exceeds_part_limit
from tests.serving.api.inference_calls import IMAGE, image_input, infer_request, parameters, scores_output

INFER = oip.ModelInferRequest.DESCRIPTOR


def parts_in(message: Message) -> int:
    """Count the fields of a message at any depth; a packed list counts as one plus one for each of its bytes."""
    count = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for name in value:
                count += 2  # the entry and its name
                count += 1 + parts_in(value[name])
        elif field.message_type is not None:
            count += sum(1 + parts_in(each) for each in (value if field.is_repeated else [value]))
        elif field.is_repeated and field.type not in (field.TYPE_BYTES, field.TYPE_STRING):
            alone = type(message)()
            getattr(alone, field.name).extend(value)
            count += 1 + alone.ByteSize() - 2  # without tag and length, one byte each here
        else:
            count += len(value) if field.is_repeated else 1
    return count


GOOD: dict[str, Message] = {
    "empty": pb.ClassifyRequest(),
    "an image": pb.ClassifyRequest(image=bytes(5000), model="six", top_k=3, mirror=False, scales=[256, 384, 2**31]),
    "an image of a stream": pb.ClassifyStreamRequest(id="a", request=pb.ClassifyRequest(image=IMAGE, scales=[40, 41])),
    "an image of an evaluation": pb.EvaluateRequest(image=pb.LabelledImage(file="a/b.png", data=IMAGE, label=0)),
    "raw images": infer_request([IMAGE] * 3, values={"protocol": "center", "timeout": -5, "mirror": True}),
    "typed images": infer_request(
        inputs=[image_input([64, 1], contents=oip.InferTensorContents(bytes_contents=[IMAGE] * 64))],
        outputs=[scores_output(classification=5)],
        raw_input_contents=[],
    ),
    "numbers of every kind": oip.InferTensorContents(
        int_contents=[-1, 5],
        uint64_contents=[2**63],
        fp32_contents=[0.5],
        fp64_contents=[0.25, 1],
        bool_contents=[True],
    ),
    "doubles": oip.ModelInferRequest(parameters={"a": oip.InferParameter(double_param=0.5)}),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_message_exceeds_every_limit_below_its_number_of_parts(name: str) -> None:
    message = GOOD[name]
    data, count = message.SerializeToString(), parts_in(message)
    assert not exceeds_part_limit(data, message.DESCRIPTOR, count)
    assert count == 0 or exceeds_part_limit(data, message.DESCRIPTOR, count - 1)


MANY: dict[str, tuple[Message | bytes, Any]] = {
    "scales": (pb.ClassifyRequest(scales=[100] * 10_000), pb.ClassifyRequest),
    "scales of a stream": (
        pb.ClassifyStreamRequest(request=pb.ClassifyRequest(scales=[1] * 10_000)),
        pb.ClassifyStreamRequest,
    ),
    "scales each with a tag": (b"\x38\x64" * 10_000, pb.ClassifyRequest),
    "empty inputs": (oip.ModelInferRequest(inputs=[image_input([], "", "")] * 10_000), oip.ModelInferRequest),
    "outputs": (oip.ModelInferRequest(outputs=[scores_output("a")] * 10_000), oip.ModelInferRequest),
    "parameters": (infer_request(values={str(number): True for number in range(10_000)}), oip.ModelInferRequest),
    "parameters of an input": (
        infer_request(inputs=[image_input(parameters=parameters({str(number): 1 for number in range(10_000)}))]),
        oip.ModelInferRequest,
    ),
    "a shape": (infer_request(inputs=[image_input([1] * 10_000)]), oip.ModelInferRequest),
    "empty raw contents": (oip.ModelInferRequest(raw_input_contents=[b""] * 10_000), oip.ModelInferRequest),
    "typed contents": (
        infer_request(inputs=[image_input(contents=oip.InferTensorContents(fp32_contents=[0.5] * 10_000))]),
        oip.ModelInferRequest,
    ),
    "unknown fields": (b"\xf8\x7f\x01" * 10_000, pb.ClassifyRequest),
    "unknown groups": (b"\xfb\x7f\xfc\x7f" * 10_000, pb.ClassifyRequest),
}


@pytest.mark.parametrize("name", MANY)
def test_many_parts_of_any_kind_are_counted(name: str) -> None:
    data, kind = MANY[name]
    data = data if isinstance(data, bytes) else data.SerializeToString()
    kind.FromString(data)  # a valid message
    assert exceeds_part_limit(data, kind.DESCRIPTOR, 1000)


def test_unknown_fields_of_fixed_size_are_counted() -> None:
    """Field number 2047, seven times with 4 bytes and seven times with 8."""
    data = b"\xfd\x7fabcd" * 7 + b"\xf9\x7fabcdefgh" * 7
    pb.ClassifyRequest.FromString(data)
    assert [exceeds_part_limit(data, pb.ClassifyRequest.DESCRIPTOR, limit) for limit in (13, 14)] == [True, False]


def test_bytes_of_an_unknown_group_do_not_hide_later_fields() -> None:
    """Bytes inside the group look like a field `inputs` that extends far beyond it."""
    looks_longer = b"\x2a\x03" + b"\x12\xff\x7f"  # 3 bytes of field 5 that declare a field of 16383 bytes
    data = b"\xfb\x7f" + looks_longer + b"\xfc\x7f" + b"\x2a\x00" * 2000
    assert len(oip.ModelInferRequest.FromString(data).inputs) == 2000
    assert exceeds_part_limit(data, INFER, 1000)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 2**24,
        b"\x80" * 2**24,
        b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(2**24),
        b"\x2a",
        b"\x0a\x05",
    ],
    ids=["a number without end", "another", "a length beyond all", "a tag alone", "a length alone"],
)
def test_malformed_bytes_are_left_to_decoding(data: bytes) -> None:
    exceeds_part_limit(data, INFER, 1000)  # ends soon, with any result
    with pytest.raises(DecodeError):
        oip.ModelInferRequest.FromString(data)


def test_every_message_that_decodes_into_many_inputs_exceeds_the_limit() -> None:
    """Random bytes of valid tags and lengths, before many inputs."""
    chance = random.Random(0)
    pieces = [
        b"\x2a",
        b"\x12",
        b"\x0a",
        b"\xfb\x7f",
        b"\xfc\x7f",
        b"\x08",
        b"\x0d",
        b"\x09",
        *(bytes([number]) for number in range(12)),
    ]
    decoded = 0
    for _ in range(20_000):
        data = b"".join(chance.choices(pieces, k=chance.randrange(12))) + b"\x2a\x00" * 60
        try:
            message = oip.ModelInferRequest.FromString(data)
        except DecodeError:
            continue
        decoded += 1
        assert len(message.inputs) < 30 or exceeds_part_limit(data, INFER, 29), data
    assert decoded > 1000
