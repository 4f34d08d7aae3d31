"""The image in an HTTP form."""

from email.parser import BytesHeaderParser

from ...errors import UsageError

_MAX_HEAD = 2**12  # bytes before the file


def image_in_form(body: bytes) -> bytes:
    """Return the file in a form of one part, a file named image (RFC 7578). Raises UsageError for any other form.

    With a single part there is little to parse. A parser for forms of all kinds (python-multipart 0.0.34) takes more
    than a minute for 64 MiB that are meant to keep it busy.
    """
    head = body[: max(0, body.find(b"\r\n\r\n", 0, _MAX_HEAD))]
    delimiter, _, fields = head.partition(b"\r\n")
    end = body.find(b"\r\n" + delimiter, len(head))
    part = BytesHeaderParser().parsebytes(fields)
    named = part.get_param("name", header="content-disposition") == "image" and part.get_filename() is not None
    alone = body.startswith(b"--", end + 2 + len(delimiter))  # the closing delimiter, RFC 2046, 5.1.1
    if not delimiter.startswith(b"--") or end < 0 or not alone or not named:
        raise UsageError(
            "this form is not one file named image and nothing else; send curl -F image=@photo.jpg, or the image as "
            "the body (curl --data-binary @photo.jpg), and options in the query, as in ?top_k=3"
        )
    return body[len(head) + 4 : end]
