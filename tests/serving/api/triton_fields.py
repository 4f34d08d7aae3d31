"""The fields of a message as data, so that two processes with messages of the same names can compare them."""

from typing import Any

from google.protobuf.descriptor import Descriptor


def fields_of(descriptor: Descriptor) -> dict[str, Any]:
    """Return the fields of a message and of its nested messages, by full name."""
    fields = {
        field.name: [field.number, field.type, field.is_repeated, getattr(field.message_type, "full_name", "")]
        for field in descriptor.fields
    }
    inner = (fields_of(nested) for nested in descriptor.nested_types)
    return {descriptor.full_name: fields} | {name: found for one in inner for name, found in one.items()}
