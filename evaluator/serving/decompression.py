"""Compressed messages and bodies."""

import zlib

from ..errors import UsageError


def decompressed(data: bytes, limit: int) -> bytes:
    """Decompress a message, of gzip or deflate, to at most `limit` bytes."""
    inflater = zlib.decompressobj(32 + zlib.MAX_WBITS)  # 32: either kind of header
    try:
        message = inflater.decompress(data, limit)
    except zlib.error as error:
        raise UsageError(f"this message is damaged: it cannot be decompressed ({error})") from None
    if inflater.unconsumed_tail or not inflater.eof:
        raise UsageError(f"this message is cut off, or larger than {limit} bytes when it is decompressed")
    return message
