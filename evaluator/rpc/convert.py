"""Convert messages of proto/prelunet/v1 to plain data, for server and client. Imports no serving or compute code."""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from ..answer import Answer, answer_from_json
from ..pb.prelunet.v1 import prelunet_pb2 as pb


def to_plain(message: Message) -> dict[str, Any]:
    """Return a message as plain data, with its field names in proto order; an unset optional field is None."""
    plain = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _with_nulls(plain, message)


def _with_nulls(plain: dict[str, Any], message: Message) -> dict[str, Any]:
    """Set unset optional fields to None, at any depth: JSON has null there, but the conversion omits the field.

    A list cannot be unset, so a null interval is sent as an empty list.
    """
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value, inner = plain.get(field.name), getattr(message, field.name)
        if isinstance(value, dict) and isinstance(inner, Message):
            value = _with_nulls(value, inner)
        elif value == [] and field.name.endswith("_interval"):
            value = None
        elif isinstance(value, dict):  # a map, whose order on the wire is undefined
            value = dict(sorted(value.items()))
        elif isinstance(value, list) and field.message_type is not None:
            value = [_with_nulls(entry, part) for entry, part in zip(value, inner, strict=True)]
        result[field.name] = value
    return result


def report_from_message(message: pb.Report) -> dict[str, Any]:
    """Return report.json from its message, with the keys in the same order."""
    report = convert_nested_lists(to_plain(message), lambda wrapped: wrapped["values"])
    for model in (report["model"], *(member["model"] for member in report["members"])):
        if model is not None and model["calibration"] is None:  # only int8 files have the key
            del model["calibration"]
    _drop_usual_preparation(report["protocol"])
    return report


def _drop_usual_preparation(protocol: dict[str, Any] | None) -> None:
    """Remove the key that only protocols of adopted nets have. protocol: None in an empty message."""
    if protocol is not None and protocol["preparation"] is None:
        del protocol["preparation"]


def convert_nested_lists(report: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a report with each list inside a list replaced by `change`: a message holds it as `WholeNumbers`."""
    worst = {**report["worst"], "counts": [change(row) for row in report["worst"]["counts"]]}
    return {**report, "worst": worst, "same_names": [change(group) for group in report["same_names"]]}


def answer_from_message(message: pb.ClassifyResponse) -> Answer:
    """Return the answer for one image from its message, whose heat map is taken out."""
    heatmap = message.heatmap
    message.ClearField("heatmap")  # else it would be converted to base64 text first
    plain = to_plain(message)
    del plain["heatmap"], plain["maps"]
    _drop_usual_preparation(plain["protocol"])
    return answer_from_json(plain, heatmap)
