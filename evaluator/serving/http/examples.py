"""The images that the live page offers to try, those that are in a folder when the server starts."""

from collections.abc import Mapping
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from ...errors import UsageError
from ...files import read_regular
from ...imaging.decode import SUFFIXES
from ...imaging.limits import DecodeLimits
from ..watched_files import in_thread
from .door import HttpCall, HttpDoor, JsonResponse

_METHOD = "prelunet.http/Examples"  # for access.py and the log; gRPC has no such method
MAX_EXAMPLES = 24


def find_examples(folder: Path) -> dict[str, Path]:
    """Return the first images of a folder by name. Raises UsageError if there is none."""
    if not folder.is_dir():
        raise UsageError(f"--examples {folder}: not a folder. Give one with images")
    found = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in SUFFIXES][:MAX_EXAMPLES]
    if not found:
        raise UsageError(f"--examples {folder}: no image there. Give a folder with JPEG or PNG files, for example")
    return {file.name: file for file in found}


def example_routes(door: HttpDoor, examples: Mapping[str, Path]) -> list[Route]:
    """Return the routes of the list, and of each image."""

    async def listed(_call: HttpCall) -> Response:
        return JsonResponse({"examples": list(examples)})

    async def image(call: HttpCall) -> Response:
        try:
            found = await in_thread(read_regular, examples[call.parameters["name"]], DecodeLimits.max_bytes)
        except (KeyError, OSError):  # also one that has been removed, or is larger than any image that is accepted
            raise HTTPException(404, "no such example; GET /examples lists all") from None
        return Response(found, media_type="application/octet-stream")

    return [
        Route("/examples", door.endpoint_of(_METHOD, listed), methods=["GET"]),
        Route("/examples/{name}", door.endpoint_of(_METHOD, image), methods=["GET"]),
    ]
