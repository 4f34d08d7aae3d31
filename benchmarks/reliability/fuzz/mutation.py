"""Seeded damage to bytes, to pictures by the structure of their files, and to messages by their fields.

All randomness comes from the generator passed in, so that equal seeds do equal damage.
"""

import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

EXTREMES = (0, 1, 2, 7, 8, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
MAX_BYTES = 2**17  # size limit of the result; more bytes only take longer

Damage = Callable[[random.Random, bytes], bytes]


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    """Flip 1 to 16 bits."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, data: bytes) -> bytes:
    """Keep only the beginning."""
    return data[: rng.randrange(len(data))]


def cut_out(rng: random.Random, data: bytes) -> bytes:
    """Remove a piece."""
    begin, end = _piece(rng, data)
    return data[:begin] + data[end:]


def repeat(rng: random.Random, data: bytes) -> bytes:
    """Repeat a piece 2 to 50 times."""
    begin, end = _piece(rng, data)
    return data[:begin] + data[begin:end] * rng.choice((2, 3, 10, 50)) + data[end:]


def move(rng: random.Random, data: bytes) -> bytes:
    """Copy a piece over another place."""
    begin, end = _piece(rng, data)
    there = rng.randrange(len(data))
    return data[:there] + data[begin:end] + data[there + end - begin :]


def insert(rng: random.Random, data: bytes) -> bytes:
    """Insert random bytes, or a run of 0 or 255."""
    there, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 100, 5000))
    new = rng.choice((rng.randbytes(length), b"\0" * length, b"\xff" * length))
    return data[:there] + new + data[there:]


def edit_number(rng: random.Random, data: bytes) -> bytes:
    """Write an extreme number of 1, 2 or 4 bytes in either byte order, mostly near the beginning."""
    size = rng.choice((1, 2, 4))
    order: Literal["little", "big"] = rng.choice(("little", "big"))
    last = max(1, len(data) - size)
    there = rng.randrange(min(last, 64) if rng.random() < 0.6 else last)
    number = rng.choice(EXTREMES) % (1 << 8 * size)
    return data[:there] + number.to_bytes(size, order) + data[there + size :]


def edit_number_by_little(rng: random.Random, data: bytes) -> bytes:
    """Change a byte by 1 or 2, as in lengths that are off by one."""
    changed = bytearray(data)
    there = rng.randrange(min(len(data), 256) if rng.random() < 0.6 else len(data))
    changed[there] = (changed[there] + rng.choice((-2, -1, 1, 2))) % 256
    return bytes(changed)


def _piece(rng: random.Random, data: bytes) -> tuple[int, int]:
    begin = rng.randrange(len(data))
    return begin, min(len(data), begin + rng.choice((1, 2, 4, 16, 64, 256, 1024)))


ANY_BYTES: tuple[Damage, ...] = (
    flip_bits, flip_bits, truncate, cut_out, repeat, move, insert, edit_number, edit_number, edit_number_by_little,
)  # fmt: skip


def splice(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Join the beginning of one and the end of another."""
    other = rng.choice(others)
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other) + 1) :]


def damaged_bytes(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Damage bytes one to four times."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not data:
            break
        data = splice(rng, data, others) if rng.random() < 0.1 else rng.choice(ANY_BYTES)(rng, data)
    return data[:MAX_BYTES]


def damaged_picture(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Damage a picture. PNG checksums are mostly recomputed; otherwise nothing behind them would be reached."""
    damaged = damaged_bytes(rng, data, others)
    return with_right_sums(damaged) if damaged.startswith(PNG) and rng.random() < 0.8 else damaged


PNG = b"\x89PNG\r\n\x1a\n"


def with_right_sums(data: bytes) -> bytes:
    """Return a PNG file with the checksums of all chunks recomputed, as far as their lengths are valid."""
    result, place = bytearray(data), len(PNG)
    while place + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, place)
        end = place + 8 + length
        if end + 4 > len(data):
            break
        struct.pack_into(">I", result, end, zlib.crc32(data[place + 4 : end]))
        place = end + 4
    return bytes(result)


# Messages

_TEXTS = ("", "\0", "é", "\u202e", "x" * 100, "x" * 5000, "../../etc/passwd", "%s%n", "center", "dense-28", "dense-0",
          "dense-99999999999", "multi-scale", "center-28-29-30-31", "-1", "demo", "1", "BYTES", "FP32", "images",
          "scores", "𝒳" * 50, "a\r\nb")  # fmt: skip
_NUMBERS = (0, 1, -1, 2, 5, 28, 29, 64, 65, 127, 128, 255, 1000, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**62,
            2**63 - 1, -(2**63), 2**64 - 1)  # fmt: skip
_FLOATS = (0.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def damage_message(rng: random.Random, message: Message, blobs: Sequence[bytes]) -> None:
    """Change 1 to 4 fields of a message, at any depth. blobs: values for bytes fields."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        _change_field(rng, message, blobs)


def _change_field(rng: random.Random, message: Message, blobs: Sequence[bytes]) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    if rng.random() < 0.2:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(rng, getattr(message, field.name), field, blobs)
    elif field.is_repeated:
        _change_list(rng, getattr(message, field.name), field, blobs)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        _change_field(rng, inner, blobs)
    else:
        setattr(message, field.name, _value(rng, field, blobs))


def _change_list(rng: random.Random, values: Any, field: FieldDescriptor, blobs: Sequence[bytes]) -> None:
    """Change, add, duplicate or delete an element; sometimes add a thousand."""
    long = field.cpp_type == FieldDescriptor.CPPTYPE_STRING  # texts, and bytes
    if len(values) and rng.random() < 0.3:
        del values[rng.randrange(len(values))]
    elif field.message_type is None:
        values.extend(_value(rng, field, blobs) for _ in range(rng.choice((1, 1, 2, 33, 3 if long else 1000))))
    elif len(values) and rng.random() < 0.6:
        one = rng.choice(values)
        _change_field(rng, one, blobs)
        if rng.random() < 0.3:
            values.add().CopyFrom(one)
    else:
        for _ in range(rng.choice((1, 2, 100))):
            _change_field(rng, values.add(), blobs)


def _change_map(rng: random.Random, values: Any, field: FieldDescriptor, blobs: Sequence[bytes]) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    existing = list(values) or [""]
    chosen = rng.choice(existing) if rng.random() < 0.5 else rng.choice((*PARAMETERS, _value(rng, key, blobs)))
    if value.message_type is None:
        values[chosen] = _value(rng, value, blobs)
    else:
        _change_field(rng, values[chosen], blobs)


PARAMETERS = ("protocol", "scales", "mirror", "apply_exif", "timeout", "classification", "priority", "sequence_id",
              "binary_data_output", "shared_memory_region", "triton_enable_empty_final_response")  # fmt: skip


def _value(rng: random.Random, field: FieldDescriptor, blobs: Sequence[bytes]) -> Any:
    """Draw a value that the field can hold, usually an unusual one."""
    kind = field.cpp_type
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice(blobs)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice(_TEXTS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 99))
    low, high = _BOUNDS[kind]
    return rng.choice([number for number in _NUMBERS if low <= number <= high])


def odd_wire(rng: random.Random, data: bytes) -> bytes:
    """Add valid or broken wire data that no field declares: unknown fields, other wire types, groups, deep nesting."""
    number = rng.choice((1, 2, 3, 5, 15, 16, 99, 2**29 - 1))
    added = rng.choice(
        (
            _tag(number, 0) + b"\xff" * rng.choice((9, 10, 11)) + b"\x01",  # a varint that is too long
            _tag(number, 1) + rng.randbytes(8),
            _tag(number, 2) + _varint(rng.choice((0, 5, 2**31 - 1, 2**32, 2**63))) + b"12345",
            _tag(number, 5) + rng.randbytes(4),
            _tag(number, 3) + _tag(number, 4),
            _tag(number, 3) * rng.choice((1, 50, 200)),  # groups without an end
            _tag(number, 4),
            _tag(number, rng.choice((6, 7))),
            _nested(number, rng.choice((10, 99, 101, 500))),
        )
    )
    return data + added if rng.random() < 0.5 else added + data


def _nested(number: int, depth: int) -> bytes:
    data = b""
    for _ in range(depth):
        data = _tag(number, 2) + _varint(len(data)) + data
    return data


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes(data) + bytes([value])
