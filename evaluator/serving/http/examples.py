"""The images that the live page offers to try: read once, when the server starts."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from ...errors import UsageError
from ...files import read_regular
from ...imaging.decode import SUFFIXES
from .door import HttpCall, HttpDoor, JsonResponse

_METHOD = "prelunet.http/Examples"  # for access.py and the log; gRPC has no such method
MAX_EXAMPLES, MAX_BYTES = 24, 2**22  # images, and bytes of each


def read_examples(folder: Path) -> dict[str, bytes]:
    """Return the first images of a folder by name. Raises UsageError if there is none, or one is too large."""
    if not folder.is_dir():
        raise UsageError(f"--examples {folder}: not a folder. Give one with images")
    files = (file for file in sorted(folder.iterdir()) if file.suffix.lower() in SUFFIXES)
    try:
        found = {file.name: read_regular(file, MAX_BYTES) for file in islice(files, MAX_EXAMPLES)}
    except OSError as error:
        raise UsageError(
            f"--examples: {error.filename}: cannot be read ({error.strerror}). Give images of at most {MAX_BYTES} bytes"
        ) from error
    if not found:
        raise UsageError(f"--examples {folder}: no image there. Give a folder with JPEG or PNG files, for example")
    return found


def example_routes(door: HttpDoor, examples: Mapping[str, bytes]) -> list[Route]:
    """Return the routes of the list, and of each image."""

    async def listed(_call: HttpCall) -> Response:
        return JsonResponse({"examples": list(examples)})

    async def image(call: HttpCall) -> Response:
        if (found := examples.get(call.parameters["name"])) is None:
            raise HTTPException(404, "no such example; GET /examples lists all")
        return Response(found, media_type="application/octet-stream")

    return [
        Route("/examples", door.endpoint_of(_METHOD, listed), methods=["GET"]),
        Route("/examples/{name}", door.endpoint_of(_METHOD, image), methods=["GET"]),
    ]
