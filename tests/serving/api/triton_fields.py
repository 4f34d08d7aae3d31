"""The fields of a message as data; for two processes that have messages of the same names."""

from typing import Any

from google.protobuf.descriptor import Descriptor


def fields_of(descriptor: Descriptor) -> dict[str, Any]:
    """Return the fields of a message, and those of the messages inside it, by their full names."""
    fields = {
        field.name: [field.number, field.type, field.is_repeated, getattr(field.message_type, "full_name", "")]
        for field in descriptor.fields
    }
    inner = (fields_of(nested) for nested in descriptor.nested_types)
    return {descriptor.full_name: fields} | {name: told for one in inner for name, told in one.items()}
