"""Compressed messages and bodies."""

import zlib

from ..errors import UsageError

_MAX_RATIO, _ALWAYS = 8, 2**18  # images hardly become smaller; a form or JSON around a small one may


def max_decompressed(data: bytes, limit: int) -> int:
    """Return how many bytes a compressed message may become. limit: of any message."""
    return min(_MAX_RATIO * len(data) + _ALWAYS, limit)


def decompressed(data: bytes, limit: int) -> bytes:
    """Decompress a message, of gzip or deflate, to at most `limit` bytes."""
    inflater = zlib.decompressobj(32 + zlib.MAX_WBITS)  # 32: either kind of header
    try:
        message = inflater.decompress(data, limit)
    except zlib.error as error:
        raise UsageError(f"this message is damaged: it cannot be decompressed ({error})") from None
    if inflater.unconsumed_tail or not inflater.eof:
        raise UsageError(
            f"this message is cut off, or larger than {limit} bytes when it is decompressed, more than its {len(data)} "
            "bytes may become; send such a message without compression"
        )
    return message
