"""Requests of the Open Inference Protocol, built only from its messages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.pb.inference import inference_pb2 as pb
from tests.serving.serving_harness import png

IMAGE = png(40, 57, seed=1)


def raw(images: Iterable[bytes]) -> bytes:
    """Encode images as the raw contents of a BYTES tensor."""
    return b"".join(len(image).to_bytes(4, "little") + image for image in images)


def parameters(values: Mapping[str, Any]) -> dict[str, pb.InferParameter]:
    """Return parameters with the types of their values."""
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    return {name: pb.InferParameter(**{kinds[type(value)]: value}) for name, value in values.items()}


def image_input(shape: Sequence[int] = (1,), name: str = "images", datatype: str = "BYTES", **more: Any) -> Any:
    """Return the input tensor, correct or with changes."""
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, **more)


def scores_output(name: str = "scores", **values: Any) -> Any:
    """Return the output tensor, correct or with another name; values: of its parameters."""
    return pb.ModelInferRequest.InferRequestedOutputTensor(name=name, parameters=parameters(values))


def infer_request(images: Sequence[bytes] = (IMAGE,), **changes: Any) -> pb.ModelInferRequest:
    """Return a good request for model `six`, with changes applied; values: of its parameters."""
    values = changes.pop("values", {"protocol": "center"})
    fields = {
        "model_name": "six",
        "inputs": [image_input([len(images)])],
        "raw_input_contents": [raw(images)],
        **changes,
    }
    return pb.ModelInferRequest(parameters=parameters(values), **fields)


def scores_in(response: pb.ModelInferResponse) -> npt.NDArray[np.float32]:
    """Return the scores of an answer, raw or typed, as float32 (N, classes)."""
    (output,) = response.outputs
    assert (output.name, output.datatype) == ("scores", "FP32")
    if response.raw_output_contents:
        (elements,) = response.raw_output_contents
        return np.frombuffer(elements, "<f4").reshape(output.shape)
    return np.array(output.contents.fp32_contents, np.float32).reshape(output.shape)


def texts_in(response: pb.ModelInferResponse) -> list[str]:
    """Return the texts of an answer, raw or typed, row by row."""
    (output,) = response.outputs
    assert (output.name, output.datatype) == ("scores", "BYTES")
    if not response.raw_output_contents:
        return [text.decode() for text in output.contents.bytes_contents]
    (elements,) = response.raw_output_contents
    texts, place = [], 0
    while place < len(elements):
        end = place + 4 + int.from_bytes(elements[place : place + 4], "little")
        texts.append(elements[place + 4 : end].decode())
        place = end
    return texts
