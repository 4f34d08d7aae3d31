"""Bad and odd calls, by their names in tests/serving/bad-calls.md. Each returns or fails with a status."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from PIL import Image

from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.inference import inference_pb2_grpc as oip_grpc
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from tests.serving.api.inference_calls import IMAGE, image_input, infer_request, parameters, raw, scores_output

GOOD = pb.ClassifyRequest(image=IMAGE, model="six").SerializeToString()
MANY_SCALES = GOOD + b"\x3a\x80\x80\x80\x04" + b"\x64" * 2**23  # 2^23 packed numbers in field 7, each 100
MANY_INPUTS = b"\x2a\x00" * 2**22  # empty ones
RUBBISH = b"\xff\xff\xff\xff\x01"  # a tag that never ends
INFER = "/inference.GRPCInferenceService/ModelInfer"
CLASSIFY = "/prelunet.v1.PreluNetService/Classify"

Call = Callable[[grpc.Channel], Any]


def large_bmp() -> bytes:
    """Return an image file of 6 MB."""
    buffer = io.BytesIO()
    Image.new("RGB", (1500, 1400), (90, 160, 30)).save(buffer, "BMP")
    return buffer.getvalue()


def outcome_of(call: Call, channel: grpc.Channel) -> tuple[str, str]:
    """Make a call; return its status, for OK with the result, and the text of its error."""
    try:
        result = call(channel)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return f"OK ({result})" if isinstance(result, str) else "OK", ""


def infer(**changes: Any) -> Call:
    """Return a call of ModelInfer; changes: see `infer_request`."""
    return lambda channel: _sent(channel, infer_request(**changes))


def _sent(channel: grpc.Channel, request: oip.ModelInferRequest) -> oip.ModelInferResponse:
    return oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)


def classify(**changes: Any) -> Call:
    """Return a call of Classify; changes: fields that differ from a good request."""
    request = {"image": IMAGE, "model": "six", "protocol": "center", **changes}
    return lambda channel: pb_grpc.PreluNetServiceStub(channel).Classify(pb.ClassifyRequest(**request), timeout=60)


def _ready(channel: grpc.Channel) -> str:
    request = oip.ModelReadyRequest(name="nine")
    return f"ready={str(oip_grpc.GRPCInferenceServiceStub(channel).ModelReady(request, timeout=60).ready).lower()}"


def _health(channel: grpc.Channel) -> None:
    request = health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")
    status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status
    assert status == health_pb2.HealthCheckResponse.SERVING


def _reflection(channel: grpc.Channel) -> None:
    reflected = ProtoReflectionDescriptorDatabase(channel)
    assert "inference.GRPCInferenceService" in reflected.get_services()
    reflected.FindFileContainingSymbol("inference.GRPCInferenceService")


# The 22 calls with which three other servers were measured.
MATRIX: Mapping[str, Call] = {
    "unknown model": infer(model_name="nine"),
    "empty model name": infer(model_name=""),
    "unknown version 99": infer(model_version="99"),
    "ModelReady of an unknown model": _ready,
    "wrong input name": infer(inputs=[image_input(name="pixels")]),
    "wrong datatype INT64": infer(inputs=[image_input(datatype="INT64")]),
    "unknown datatype FOO": infer(inputs=[image_input(datatype="FOO")]),
    "raw contents shorter than the shape": infer(inputs=[image_input([2])]),
    "raw contents longer than the shape": infer(raw_input_contents=[raw([IMAGE, IMAGE])]),
    "negative dimension": infer(inputs=[image_input([-1])]),
    "dimension 2^62": infer(inputs=[image_input([2**62])]),
    "no inputs": infer(inputs=[]),
    "duplicate input": infer(inputs=[image_input(), image_input()], raw_input_contents=[raw([IMAGE])] * 2),
    "one raw content too many": infer(raw_input_contents=[raw([IMAGE])] * 2),
    "unknown output name": infer(outputs=[scores_output("logits")]),
    "classification 2^40": infer(outputs=[scores_output(classification=2**40)]),
    "timeout of -5 microseconds": infer(values={"timeout": -5}),
    "zero-size dimension": infer(inputs=[image_input([0])], raw_input_contents=[b""]),
    "message of 6 MB": infer(images=[large_bmp()]),
    "bytes that are no message": lambda channel: channel.unary_unary(INFER)(RUBBISH, timeout=60),
    "grpc.health.v1 Check": _health,
    "reflection": _reflection,
}

MORE_OVER_OIP: Mapping[str, Call] = {
    "message above the limit": infer(images=[b"x" * 2**26]),
    "8 MB of empty inputs": lambda channel: channel.unary_unary(INFER)(MANY_INPUTS, timeout=60),
    "shape of 8 MB": lambda channel: _sent(channel, infer_request(inputs=[image_input([1] * 2**23)])),
    "scales as a text of 8 MB": infer(values={"scales": "1," * 2**22}),
    "input name of 8 MB": infer(inputs=[image_input(name="n" * 2**23)]),
    "65 images": infer(images=[IMAGE] * 65),
    "shape [1, 4]": infer(inputs=[image_input([1, 4])], raw_input_contents=[raw([IMAGE] * 4)]),
    "shape [2^62, 4], whose product overflows": infer(inputs=[image_input([2**62, 4])]),
    "shape of no dimension": infer(inputs=[image_input([])]),
    "length in front of an image of 2^32 - 1": infer(raw_input_contents=[b"\xff\xff\xff\xff" + IMAGE]),
    "raw contents of three bytes": infer(raw_input_contents=[b"\x01\x00\x00"]),
    "no contents": infer(raw_input_contents=[]),
    "raw and typed contents": infer(inputs=[image_input(contents=oip.InferTensorContents(bytes_contents=[IMAGE]))]),
    "fewer typed contents than the shape": infer(
        inputs=[image_input([2], contents=oip.InferTensorContents(bytes_contents=[IMAGE]))], raw_input_contents=[]
    ),
    "contents of another type": infer(
        inputs=[image_input(contents=oip.InferTensorContents(int_contents=[1]))], raw_input_contents=[]
    ),
    "parameter of an input": infer(inputs=[image_input(parameters=parameters({"shared_memory_region": "r"}))]),
    "content_type np": infer(inputs=[image_input(parameters=parameters({"content_type": "np"}))]),
    "content_type base64 of an image that is not": infer(values={"content_type": "base64"}),
    "duplicate output": infer(outputs=[scores_output(), scores_output()]),
    "parameter of an output": infer(outputs=[scores_output(shared_memory_region="r")]),
    "classification 0": infer(outputs=[scores_output(classification=0)]),
    "classification -1": infer(outputs=[scores_output(classification=-1)]),
    "classification as a text": infer(outputs=[scores_output(classification="5")]),
    "unknown parameter": infer(values={"sequence_id": 7}),
    "parameter reserved by Triton": infer(values={"triton_whatever": True}),
    "priority 1": infer(values={"priority": 1}),
    "protocol of another type": infer(values={"protocol": 5}),
    "unknown protocol": infer(values={"protocol": "twelve-crop"}),
    "scales that are no numbers": infer(values={"scales": "256;384"}),
    "scale below the crop": infer(values={"scales": 27}),
    "scales beside a protocol that names them": infer(values={"protocol": "dense-30", "scales": "40"}),
    "64 images in 20 views each": infer(
        images=[IMAGE] * 64, values={"protocol": "multi-scale", "scales": ",".join(map(str, range(28, 38)))}
    ),
    "second image is none": infer(images=[IMAGE, b"no image"]),
    "ModelMetadata of an unknown model": lambda channel: oip_grpc.GRPCInferenceServiceStub(channel).ModelMetadata(
        oip.ModelMetadataRequest(name="nine"), timeout=60
    ),
    "ModelConfig of an unknown version": lambda channel: oip_grpc.GRPCInferenceServiceStub(channel).ModelConfig(
        oip.ModelConfigRequest(name="six", version="2"), timeout=60
    ),
    "ModelStatistics of an unknown model": lambda channel: oip_grpc.GRPCInferenceServiceStub(channel).ModelStatistics(
        oip.ModelStatisticsRequest(name="nine"), timeout=60
    ),
    "RepositoryIndex of a repository": lambda channel: oip_grpc.GRPCInferenceServiceStub(channel).RepositoryIndex(
        oip.RepositoryIndexRequest(repository_name="r"), timeout=60
    ),
    "RepositoryModelLoad without `--models`": lambda channel: oip_grpc.GRPCInferenceServiceStub(
        channel
    ).RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name="six"), timeout=60),
    "SystemSharedMemoryStatus": lambda channel: channel.unary_unary(
        INFER.replace("ModelInfer", "SystemSharedMemoryStatus")
    )(b"", timeout=60),
}

OVER_PRELUNET: Mapping[str, Call] = {
    "unknown model": classify(model="nine"),
    "no model name where two are served": classify(model=""),
    "no image": classify(image=b""),
    "unknown protocol": classify(protocol="twelve-crop"),
    "scale below the crop": classify(protocol="", scales=[27]),
    "scale 2^32 - 1": classify(protocol="", scales=[2**32 - 1]),
    "33 scales": classify(protocol="", scales=range(28, 61)),
    "8 MB of scales": lambda channel: channel.unary_unary(CLASSIFY)(MANY_SCALES, timeout=60),
    "protocol name of 8 MB": classify(protocol="p" * 2**23),
    "scales beside a protocol that names them": classify(protocol="dense-30", scales=[40]),
    "top_k 0": classify(top_k=0),
    "top_k -1": classify(top_k=-1),
    "top_k 2^31 - 1": classify(top_k=2**31 - 1),
    "message of 6 MB": classify(image=large_bmp()),
    "message above the limit": classify(image=b"x" * 2**26),
    "bytes that are no message": lambda channel: channel.unary_unary(CLASSIFY)(RUBBISH, timeout=60),
    "unknown method": lambda channel: channel.unary_unary(CLASSIFY + "Twice")(b"", timeout=60),
    "GetModel of an unknown model": lambda channel: pb_grpc.PreluNetServiceStub(channel).GetModel(
        pb.GetModelRequest(name="nine"), timeout=60
    ),
}


def of_image(image: bytes) -> Mapping[str, Call]:
    """Return the calls that send an image, by column of tests/serving/bad-calls.md."""
    return {"Open Inference Protocol": infer(images=[image]), "prelunet.v1": classify(image=image)}
