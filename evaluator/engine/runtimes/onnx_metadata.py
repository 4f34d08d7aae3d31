"""Read the metadata of an ONNX file without a runtime, before a session is created.

The file is one protobuf message, `ModelProto` of onnx.proto: a sequence of fields, each a tag and a value. Everything
but the metadata is skipped, the graph with its weights in one step.
"""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, get_args

from ...contract import PREFIX, FilePrecision, rewrite_hint
from ...errors import ContractError, from_os_error
from ...files import open_regular

_METADATA, _KEY, _VALUE = 14, 1, 2  # ModelProto.metadata_props, and the fields of its entries, StringStringEntryProto
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf
_MAX_VARINT_BYTES = 10


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a model file; {} for anything that is not ONNX, which the runtime will report.

    Raises ContractError if they are not UTF-8, for which each runtime would raise an error of its own, and the errors
    of `from_os_error` for a file that cannot be read.
    """
    try:
        with open_regular(path) as file:
            entries = [dict(_fields(BytesIO(entry), {_KEY, _VALUE})) for _, entry in _fields(file, {_METADATA})]
        return {entry.get(_KEY, b"").decode(): entry.get(_VALUE, b"").decode() for entry in entries}
    except UnicodeDecodeError as error:
        raise ContractError(f"{path}: damaged: its metadata are not UTF-8. {rewrite_hint(str(path))}") from error
    except ValueError:
        return {}
    except OSError as error:
        raise from_os_error(error) from error


def is_model_file(path: Path) -> bool:
    """Return whether an ONNX file is a model file of prelunet, whatever its version. Raises as `read_metadata`."""
    return any(key.startswith(PREFIX) for key in read_metadata(path))


def read_precision(path: Path) -> str | None:
    """Return the precision stated in a model file, `fp32`, `fp16` or `int8`; None if it states none."""
    stated = read_metadata(path).get(f"{PREFIX}precision", "").strip('"')
    return stated if stated in get_args(FilePrecision) else None


def _fields(file: BinaryIO, wanted: set[int]) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of the wanted fields of a message; raises ValueError when it is malformed."""
    size = file.seek(0, 2)
    file.seek(0)
    while file.tell() < size:
        tag = _varint(file)
        number, kind = tag >> 3, tag & 7
        if number == 0:  # as in a file of zeros, whose space is reserved and not yet written
            raise ValueError("a field without a number")
        if kind == _VARINT:
            _varint(file)
            continue
        if kind not in {_FIXED64, _LENGTH_DELIMITED, _FIXED32}:
            raise ValueError(f"a field of kind {kind}")
        length = _varint(file) if kind == _LENGTH_DELIMITED else {_FIXED64: 8, _FIXED32: 4}[kind]
        if length > size - file.tell():
            raise ValueError("a field that leaves the message")
        if kind == _LENGTH_DELIMITED and number in wanted:
            yield number, file.read(length)
        else:
            file.seek(length, 1)


def _varint(file: BinaryIO) -> int:
    """Read a varint: seven bits per byte, the lowest first; the eighth bit marks that more follow."""
    value = 0
    for place in range(_MAX_VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            raise ValueError("a number without an end")
        value |= (byte[0] & 127) << (7 * place)
        if byte[0] < 128:
            return value
    raise ValueError("a number of more than 64 bits")
