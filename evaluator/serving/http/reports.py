"""The reports in a folder, and a table of its runs: found anew for each request, and only what is found can be opened.

No link is followed, so nothing outside is read (`walk_without_links`).
"""

import html
import os
import re
from collections.abc import AsyncIterator, Iterator, Set
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ...files import walk_without_links
from ...reporting.html import asset
from ...reporting.runs import Rows, read_runs, render_runs
from ...validation.run import RUN_FILE
from ..watched_files import in_thread
from .door import HttpCall, HttpDoor, JsonResponse

_METHOD = "prelunet.http/Reports"  # for access.py and the log; gRPC has no such method
_PAGES = {"report.html", "compare.html"}
_TABLE = "runs.html"  # made on request; no file of this name is a report
_DEPTH = 3  # folders below: RUN/report/compared-with-OTHER
_MAX_FOLDERS, _MAX_REPORTS = 2000, 200
_HEAD, _CHUNK = 2**13, 2**18  # bytes: of a page up to its style, at most; read at a time
_POLICY = (  # in an origin of its own, the inline scripts of a report cannot reach the live page and its token
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


def report_routes(door: HttpDoor, folder: Path) -> list[Route]:
    """Return the routes of the list, of the table of runs, of each report, and of the viewer.

    The viewer shows what the live page has fetched with a token. A link there has no token, so the table has none then.
    """

    known: Rows = {}

    async def chunks(page: BinaryIO) -> AsyncIterator[bytes]:
        try:
            while chunk := await in_thread(page.read, _CHUNK):
                yield chunk
        finally:
            Thread(target=page.close, daemon=True).start()  # it waits for a read that hangs

    async def listed(_call: HttpCall) -> Response:
        return JsonResponse({"reports": await in_thread(list_reports, folder)})

    async def table(call: HttpCall) -> Response:
        nonlocal known
        known = await in_thread(partial(read_runs, folder, known, open_file=None, depth=_DEPTH, limit=_MAX_FOLDERS))
        link = None if call.headers.get("authorization", "").lower().startswith("bearer") else _address
        page = await in_thread(render_runs, list(known.values()), folder.resolve().name, link)
        return Response(page, headers=_HEADERS, media_type="text/html")

    async def opened(call: HttpCall) -> Response:
        page = await in_thread(open_report, folder, call.parameters["name"])
        return StreamingResponse(chunks(page), headers=_HEADERS, media_type="text/html")

    async def viewer(_request: Request) -> Response:
        return Response(asset("report_viewer.html"), headers=_HEADERS, media_type="text/html")

    return [
        Route("/reports", door.endpoint_of(_METHOD, listed), methods=["GET"]),
        Route(f"/reports/{_TABLE}", door.endpoint_of(_METHOD, table), methods=["GET"]),
        Route("/reports/{name:path}", door.endpoint_of(_METHOD, opened), methods=["GET"]),
        Route("/report-viewer", viewer),
    ]


def list_reports(folder: Path) -> list[dict[str, Any]]:
    """Return the newest reports: name, title, summary, and when they were written, in seconds since 1970.

    The table of runs comes first, if there are runs.
    """
    found, runs = [], []
    for name, page in _pages(folder, {*_PAGES, RUN_FILE}):
        with page:
            modified = os.fstat(page.fileno()).st_mtime
            if Path(name).name == RUN_FILE:
                runs.append(modified)
                continue
            head = page.read(_HEAD).decode(errors="replace")
            texts = [re.search(each, head) for each in ("<title>(.*?)</title>", 'name="description" content="(.*?)"')]
            title, summary = (html.unescape(text[1]) if text else "" for text in texts)
            found.append({"name": name, "title": title or name, "summary": summary, "modified": modified})
    newest = sorted(found, key=itemgetter("modified"), reverse=True)[:_MAX_REPORTS]
    if not runs:
        return newest
    summary = f"{len(runs):,} run{'s' if len(runs) > 1 else ''}: errors, speed, and what computed them"
    return [{"name": _TABLE, "title": "Table of runs", "summary": summary, "modified": max(runs)}, *newest]


def open_report(folder: Path, name: str) -> BinaryIO:
    """Open a report, given its name in the list. Raises HTTPException, 404, for any other."""
    for _, page in _pages(folder, wanted=name):
        return page
    raise HTTPException(404, f"no report '{name[:200]}'; GET /reports lists all")


def _address(page: str) -> str:
    return quote(os.fsencode(page).decode(errors="replace"))  # relative to the table's


def _pages(folder: Path, names: Set[str] = _PAGES, wanted: str | None = None) -> Iterator[tuple[str, BinaryIO]]:
    """Yield the path of each file of these names below a folder, or of the wanted one, and the opened file."""
    for below, files, open_file in walk_without_links(folder.resolve(), depth=_DEPTH, limit=_MAX_FOLDERS):
        for file in names & set(files):
            name = os.fsencode(below / file).decode(errors="replace")
            if wanted in (None, name):
                with suppress(OSError):  # a link, not readable, or removed
                    yield name, open_file(below / file)
