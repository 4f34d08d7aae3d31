"""Translate messages of proto/inference to the plain types of `serving.inference`, and back."""

from collections.abc import Mapping, Sequence

from ...errors import UsageError
from ...pb.inference import inference_pb2 as pb
from ..inference import INPUT, OUTPUT, InferAnswer, InferRequest, InputTensor, Parameters, split_elements


def infer_request(request: pb.ModelInferRequest) -> InferRequest:
    """Return a request in plain types, which hold the message until its images are read."""
    outputs = request.outputs
    return InferRequest(
        parameters=_parameters(request.parameters),
        inputs=len(request.inputs),
        tensor=_input(request, request.inputs[0]) if request.inputs else None,
        outputs=[output.name for output in outputs],
        output_parameters=_parameters(outputs[0].parameters) if outputs else {},
    )


def _parameters(parameters: Mapping[str, pb.InferParameter]) -> Parameters:
    return {name: _value(parameter) for name, parameter in parameters.items()}


def _value(parameter: pb.InferParameter) -> bool | int | float | str | None:
    choice = parameter.WhichOneof("parameter_choice")
    value: bool | int | float | str | None = choice and getattr(parameter, choice)
    return value


def _input(request: pb.ModelInferRequest, tensor: pb.ModelInferRequest.InferInputTensor) -> InputTensor:
    def images(count: int) -> Sequence[bytes]:
        return _raw_images(request, tensor, count) if request.raw_input_contents else _typed_images(tensor, count)

    return InputTensor(tensor.name, tensor.datatype, tensor.shape, _parameters(tensor.parameters), images)


def _raw_images(
    request: pb.ModelInferRequest, tensor: pb.ModelInferRequest.InferInputTensor, count: int
) -> Sequence[bytes]:
    """Return the images in `raw_input_contents`."""
    if tensor.contents.ListFields():
        raise UsageError(
            f"input '{INPUT}' has elements both in `contents` and in `raw_input_contents`; send only one of them"
        )
    if len(request.raw_input_contents) > 1:
        raise UsageError(
            f"`raw_input_contents` has {len(request.raw_input_contents)} entries for one input; send one entry"
        )
    return split_elements(request.raw_input_contents[0], count)


def _typed_images(tensor: pb.ModelInferRequest.InferInputTensor, count: int) -> Sequence[bytes]:
    """Return the images in `contents`."""
    filled = [field.name for field, _ in tensor.contents.ListFields()]
    if wrong := [name for name in filled if name != "bytes_contents"]:
        raise UsageError(f"input '{INPUT}' has `{wrong[0]}`; the elements of a BYTES tensor go into `bytes_contents`")
    elements = tensor.contents.bytes_contents
    if not elements:
        raise UsageError(
            f"input '{INPUT}' has no elements; send the images in `raw_input_contents`, or as `bytes_contents` in the "
            "input's `contents`"
        )
    if len(elements) != count:
        raise UsageError(
            f"input '{INPUT}' has {len(elements)} elements in `bytes_contents`, but its shape declares {count}; the "
            "two should be equal"
        )
    return elements


def infer_response(answer: InferAnswer, id_: str, *, raw: bool) -> pb.ModelInferResponse:
    """Return the message of an answer. id_: the request's; raw: with its elements as binary data, as the request's."""
    model = answer.model
    response = pb.ModelInferResponse(model_name=model.name, model_version=str(model.version), id=id_)
    output = response.outputs.add(name=OUTPUT, datatype=answer.datatype, shape=answer.shape)
    if raw:
        response.raw_output_contents.append(answer.raw())
    elif answer.top is None:
        output.contents.fp32_contents.extend(answer.numbers())
    else:
        output.contents.bytes_contents.extend(text.encode() for text in answer.texts())
    return response
