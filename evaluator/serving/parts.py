"""How many parts the bytes of a message have, told before they are decoded.

Decoding holds Python's only lock, in whatever thread it runs, and each part becomes an object many times its size:
60 MB of empty inputs hold up every call for 3 s and take 2.7 GB. A message of ours is large because of its images, and
those are few parts. Wire format: protobuf.dev/programming-guides/encoding.
"""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_LONGEST = 10  # bytes of a number, of 7 bits each
_WHOLE = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)


def has_more_parts(data: bytes, kind: Descriptor, most: int) -> bool:
    """Say whether a message has more parts than `most`: fields at any depth, and numbers in a list of them.

    Takes time by the number of parts up to `most`, not by the number of bytes. Of bytes that are no message it may say
    either; decoding tells.
    """
    count, place = 0, 0
    open_ = [(len(data), kind)]  # the messages around this place, by their ends
    while open_ and count <= most:
        end, around = open_[-1]
        if place >= end:
            open_.pop()
            place = end  # not further: what looks like one of our messages may be some bytes of an unknown group
            continue
        count += 1
        tag, place = _varint(data, place)
        match tag & 7:
            case 0:  # a number
                _, place = _varint(data, place)
            case 1:  # of 8 bytes
                place += 8
            case 5:  # of 4 bytes
                place += 4
            case 2:  # as long as it says
                length, place = _varint(data, place)
                field = around.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    open_.append((place + length, field.message_type))
                    continue
                if field is not None and field.type not in _WHOLE:
                    count += length  # numbers, each of a byte or more
                place += length
    return count > most


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it; one that does not end is cut, as no message has any."""
    number = 0
    for index, byte in enumerate(data[place : place + _LONGEST]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, place + index + 1
    return number, place + _LONGEST
