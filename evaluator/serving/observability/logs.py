"""Structured logs on stderr: one JSON object per line for programs, or one line of text for people.

Log lines contain text from callers. Neither form lets such text forge a line or a field: characters that could end a
line or control a terminal are escaped, values in text lines are quoted, and lengths are limited. Image data is never
logged.
"""

import asyncio
import json
import logging
import os
import re
import secrets
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ...rpc.status import is_client_visible
from .call_context import Call, current_call, identity_of

MAX_LOG_MESSAGE = 2000  # characters
MAX_FIELD = 600  # characters, as in error messages to callers
MAX_TRACEBACK = 20_000  # characters
MAX_QUEUED_LINES = 4096  # lines; some 2 MB
_GATHER_SECONDS = 0.02
REPEAT_INTERVAL = 1.0  # seconds
_MAX_KINDS = 1000  # of calls that repeat; more are all logged
_NONE: tuple[int, Call | None, float] = 0, None, 0.0
_PLAIN = re.compile(r"[A-Za-z0-9._:/@%+,\[\]-]+")  # a value that needs no quotes

log = logging.getLogger(__name__)
_handler: "StderrHandler | None" = None  # of `configure_logging`
_process: int | None = None  # likewise


def log_incident(error: BaseException) -> str:
    """Log an error whose text must not reach callers, with its traceback; return its incident id.

    Afterwards the traceback holds no locals: gRPC and asyncio keep errors in reference cycles, and with them the images
    of failed calls, until the next garbage collection.
    """
    incident = secrets.token_hex(6)
    if not is_client_visible(error):
        log.error("incident %s: %s", incident, type(error).__name__, exc_info=error)
    release_frames(error)
    return incident


def release_frames(error: BaseException | None) -> None:
    """Release the locals in the tracebacks of an error, such as images; the printed traceback stays the same."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class CallLog:
    """Logs calls that end. Of calls that repeat it logs one each REPEAT_INTERVAL, with the number that it stands for.

    A call repeats another of its client and method that ended with the same status, and the same error but for numbers.
    sampled: answered calls are treated like this, too; without it, each is logged. Used in one event loop.
    """

    def __init__(self, *, sampled: bool = False) -> None:
        self._sampled = sampled
        # Of kinds whose last line is younger than the interval: the number of calls since, the latest and its seconds.
        self._repeats: dict[tuple[str, ...], tuple[int, Call | None, float]] = {}

    def ended(self, call: Call, seconds: float) -> None:
        """Log a call, now or with others. seconds: its duration."""
        if call.status == "OK" and not self._sampled:
            log_call(call, seconds)
            return
        kind = (call.identity, call.method, call.status, re.sub(r"[0-9.]+", "", call.error))
        if kind in self._repeats:
            self._repeats[kind] = self._repeats[kind][0] + 1, call, seconds
            return
        log_call(call, seconds)
        if len(self._repeats) < _MAX_KINDS:
            self._begin_interval(kind)

    def _begin_interval(self, kind: tuple[str, ...]) -> None:
        self._repeats[kind] = _NONE
        asyncio.get_running_loop().call_later(REPEAT_INTERVAL, self._end_interval, kind)

    def _end_interval(self, kind: tuple[str, ...]) -> None:
        calls, latest, seconds = self._repeats.pop(kind, _NONE)  # closed meanwhile
        if latest is not None:
            log_call(latest, seconds, calls)
            self._begin_interval(kind)

    def close(self) -> None:
        """Log what has not been logged yet; called once no more calls end."""
        for kind in list(self._repeats):
            self._end_interval(kind)


def log_call(call: Call, seconds: float, calls: int = 1) -> None:
    """Log a call that has ended. seconds: its duration; calls: number of calls that the line stands for.

    Straight to our handler, if there is no other, whose thread builds the line: `logging` takes longer than all else.
    """
    if not log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {"peer": call.peer}
    if call.identity != identity_of(call.peer):
        fields["client"] = call.identity
    fields["status"], fields["seconds"] = call.status, round(seconds, 6)
    for name, value in (
        ("id", call.id), ("model", ",".join(sorted(call.models))), ("images", call.images), ("failed", call.failed),
        ("views", call.views), ("bytes", call.bytes), ("reason", call.reason), ("error", call.error),
    ):  # fmt: skip
        if value:
            fields[name] = value
    if calls > 1:
        fields["calls"] = calls
    if _handler is None or logging.root.handlers != [_handler]:
        log.info("call ended", extra={"fields": fields, "call": call})
    else:
        _handler.write(partial(_handler.line, time.time(), "INFO", log.name, "call ended", _with_call(fields, call)))


class LineFormatter(logging.Formatter):
    """Formats records with the fields of their call, and the end of their traceback, which has location and error."""

    line: Callable[[float, str, str, str, dict[str, Any]], str]

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, or lines, of a record."""
        fields = _with_call(getattr(record, "fields", {}), getattr(record, "call", None) or current_call.get())
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)[-MAX_TRACEBACK:]
        return self.line(record.created, record.levelname, record.name, record.getMessage(), fields)


class JsonFormatter(LineFormatter):
    """One JSON object per line, in ASCII: `time` (UTC), `level`, `logger`, `message` and further fields."""

    @staticmethod
    def line(created: float, level: str, logger: str, message: str, fields: dict[str, Any]) -> str:
        """Return a line. created: seconds since 1970."""
        head = {"time": _time(created), "level": level, "logger": logger}
        return json.dumps(head | {"message": truncate(message, MAX_LOG_MESSAGE), **fields})


class TextFormatter(LineFormatter):
    """`TIME LEVEL LOGGER field=value … | message`, then the lines of a traceback, each after a bar.

    The message comes last, so that none of its text can be mistaken for a field.
    """

    @staticmethod
    def line(created: float, level: str, logger: str, message: str, fields: dict[str, Any]) -> str:
        """Return a line. created: seconds since 1970."""
        trace = fields.pop("traceback", "")
        pairs = "".join([f"{key}={_value(value)} " for key, value in fields.items()])
        line = f"{_time(created)} {level} {logger} {pairs}| {escaped(truncate(message, MAX_LOG_MESSAGE))}"
        return "\n".join([line, *(f"    | {escaped(part)}" for part in trace.split("\n") if part)])


class StderrHandler(logging.Handler):
    """Writes log lines in its own thread, so that a slow or stopped reader of stderr does not block calls.

    form: of `FORMATTERS`. At most MAX_QUEUED_LINES wait. Further lines are dropped; the next line written reports their
    number.
    """

    def __init__(self, form: str = "text", descriptor: int = 2) -> None:
        super().__init__()
        self.setFormatter(formatter := FORMATTERS[form]())
        self.line = formatter.line
        self._descriptor = descriptor
        self._lines: deque[Callable[[], str]] = deque()
        self._came, self._writing = threading.Event(), False
        self._dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record."""
        try:
            self.write(partial(str, self.format(record)))
        except Exception:
            self.handleError(record)

    def write(self, line: Callable[[], str]) -> None:
        """Queue a line, in any thread; it is built later."""
        if len(self._lines) >= MAX_QUEUED_LINES:
            self._dropped += 1
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            text = f"{dropped} lines dropped: stderr is read too slowly"
            self._lines.append(partial(self.line, time.time(), "WARNING", log.name, text, {}))
        self._lines.append(line)
        if not self._came.is_set():
            self._came.set()

    def flush(self) -> None:
        """Wait until all lines are written, at most a second; `logging` calls this when the process exits."""
        latest = time.monotonic() + 1
        while (self._came.is_set() or self._writing) and time.monotonic() < latest:
            time.sleep(0.001)

    def _write(self) -> None:
        # Not through sys.stderr: a thread that blocks there holds a lock that Python needs at exit.
        while self._came.wait():
            time.sleep(_GATHER_SECONDS)  # waking this thread for each line would cost more than the line
            self._writing = True
            self._came.clear()
            data = b""
            for _ in range(len(self._lines)):
                line = f"{self._lines.popleft()()}\n".encode("utf-8", "backslashreplace")
                if len(data) + len(line) > select.PIPE_BUF:  # more could mix with the lines of other processes
                    self._put(data)
                    data = b""
                data += line
            self._put(data)
            self._writing = False

    def _put(self, data: bytes) -> None:
        with suppress(OSError):  # no reader
            while data:
                data = data[os.write(self._descriptor, data) :]


FORMATTERS: Mapping[str, type[TextFormatter | JsonFormatter]] = {"text": TextFormatter, "json": JsonFormatter}


def configure_logging(form: str = "text", level: str = "INFO", process: int | None = None) -> None:
    """Send the logs of this process to stderr. form: "text" or "json"; level: of our own loggers, as in `logging`.

    process: its number, for each line, if it is one of several.

    Other libraries log from WARNING: at lower levels Pillow quotes the images that it decodes.
    """
    global _handler, _process
    _handler, _process = StderrHandler(form), process
    logging.basicConfig(level=logging.WARNING, handlers=[_handler], force=True)
    logging.getLogger("prelunet").setLevel(level)
    logging.captureWarnings(capture=True)
    # Its messages about broken images are in the errors sent to callers.
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: not str(record.msg).startswith(_CAUSED_BY_CLIENT))


def flush() -> None:
    """Wait until all log lines are written, at most a second.

    Not logging.shutdown: it closes the handlers of every library, which may use streams that they do not own.
    """
    for handler in logging.getLogger().handlers:
        handler.flush()


# gRPC's log messages, most with a traceback, about callers that send a path or header that is not text, or that
# disconnect during an answer.
_CAUSED_BY_CLIENT = (
    "Invalid encoding on",
    "Unexpected [UnicodeDecodeError]",
    "ExecuteBatchError raised in core",
    "Failed sending error status",
)


def truncate(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters, with an ellipsis where it was cut."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def escaped(text: str) -> str:
    """Escape all characters that could end a line, reorder it or control a terminal."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        each if each.isprintable() and each != "\\" else each.encode("unicode_escape").decode("ascii") for each in text
    )


def _time(created: float) -> str:
    return f"{datetime.fromtimestamp(created, UTC).isoformat(timespec='milliseconds')[:-6]}Z"


def _with_call(own: Mapping[str, Any], call: Call | None) -> dict[str, Any]:
    fields: dict[str, Any] = {} if _process is None else {"process": _process}
    if call is not None:
        fields["request_id"], fields["method"] = call.request_id, call.method
        fields |= call.trace.exemplar if call.trace else {}
    fields |= own
    for key, value in fields.items():
        if isinstance(value, str) and len(value) > MAX_FIELD:
            fields[key] = truncate(value, MAX_FIELD)
    return fields


def _value(value: Any) -> str:
    """Return a value as text: plain if it is unambiguous, otherwise in quotes."""
    text = str(value)
    if isinstance(value, int | float) or _PLAIN.fullmatch(text):
        return text
    return '"{}"'.format(escaped(text).replace('"', '\\"'))
