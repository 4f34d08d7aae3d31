"""Messages of proto/prelunet/v1 as plain data, for both ends. Imports nothing that serves or computes."""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from prelunet.evaluator.answer import Answer, answer_from_json
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb


def to_plain(message: Message) -> dict[str, Any]:
    """Return a message as plain data under its own field names, in their order; None where an optional one is unset."""
    plain = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _with_nulls(plain, message)


def _with_nulls(plain: dict[str, Any], message: Message) -> dict[str, Any]:
    """Write None where an optional field is unset, at any depth: there JSON has null and the conversion nothing.

    A list cannot be unset, so an interval that is null travels as an empty one.
    """
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value, inner = plain.get(field.name), getattr(message, field.name)
        if isinstance(value, dict) and isinstance(inner, Message):
            value = _with_nulls(value, inner)
        elif value == [] and field.name.endswith("_interval"):
            value = None
        elif isinstance(value, dict):  # a map, which travels in no order
            value = dict(sorted(value.items()))
        elif isinstance(value, list) and field.message_type is not None:
            value = [_with_nulls(entry, part) for entry, part in zip(value, inner, strict=True)]
        result[field.name] = value
    return result


def report_from_message(message: pb.Report) -> dict[str, Any]:
    """Return report.json from its twin on the wire, with its keys in the same order."""
    return convert_nested_lists(to_plain(message), lambda wrapped: wrapped["values"])


def convert_nested_lists(report: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a report with its lists in lists changed: on the wire each is a message, `WholeNumbers`."""
    worst = {**report["worst"], "counts": [change(row) for row in report["worst"]["counts"]]}
    return {**report, "worst": worst, "same_names": [change(group) for group in report["same_names"]]}


def answer_from_message(message: pb.ClassifyResponse) -> Answer:
    """Return the answer for one image from its twin on the wire."""
    heatmap = message.heatmap
    message.ClearField("heatmap")  # else it would be turned into text first
    plain = to_plain(message)
    del plain["heatmap"]
    return answer_from_json(plain, heatmap)
