"""Log lines that programs and people can trust: text from callers cannot forge lines or fields."""

import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from prelunet.evaluator.errors import ImageError
from prelunet.evaluator.serving.observability import logs
from prelunet.evaluator.serving.observability.call_context import Call, current_call
from prelunet.evaluator.serving.observability.logs import (
    FORMATTERS,
    MAX_FIELD,
    MAX_LOG_MESSAGE,
    MAX_QUEUED_LINES,
    MAX_TRACEBACK,
    CallLog,
    StderrHandler,
    log_call,
    log_incident,
)

FORGERY = "2026-01-01T00:00:00.000Z INFO evaluator status=OK | all is well"
NASTY = [
    f"x\n{FORGERY}",
    f"x\r\n{FORGERY}",
    f"x\x85{FORGERY}",
    f"x\u2028{FORGERY}",
    f"x\u2029{FORGERY}",
    f"x\x0b{FORGERY}\x0c\x1c\x1d\x1e",
    "\x1b[2J\x1b[31mred",
    "\u202eright to left",
    '" status=OK error="',
    "\\",
    'x", "status": "OK',
    "\0\x7f\x9b",
    "\ud800",
    "a | b",
    "x status=OK",
]


@contextmanager
def written(form: str) -> Iterator[io.StringIO]:
    """Yield a stream that receives only this module's log lines, in a form."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FORMATTERS[form]())
    logger = logging.getLogger("prelunet.evaluator.serving.observability.logs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def lines(text: str) -> list[str]:
    """Return the lines of a text, split at every Unicode line end."""
    return text.splitlines()


def pairs(line: str) -> dict[str, str]:
    """Return the fields of a text line, parsed strictly."""
    head = re.match(r"\S+ [A-Z]+ \S+", line)
    assert head is not None
    fields, rest = {}, line[head.end() :]
    while match := re.match(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"]+)', rest):
        assert match[1] not in fields
        fields[match[1]] = match[2]
        rest = rest[match.end() :]
    assert rest.startswith(" | "), rest
    return fields


@pytest.mark.parametrize("nasty", NASTY, ids=ascii)
def test_text_from_a_caller_forges_no_line_or_field_of_text_logs(nasty: str) -> None:
    call = Call("prelunet.v1.PreluNetService/Classify", "id-1", peer=nasty, status="INTERNAL", error=nasty)
    with written("text") as stream:
        log_call(call, 0.5)
        logs.log.info("%s", nasty)
    first, second = lines(stream.getvalue())
    assert first.isprintable()
    assert second.isprintable()
    assert set(pairs(first)) == {"request_id", "method", "peer", "status", "seconds", "error"}
    assert pairs(first)["status"] == "INTERNAL"
    assert pairs(second) == {}, "a message comes after the bar"


@pytest.mark.parametrize("nasty", NASTY, ids=ascii)
def test_text_from_a_caller_forges_no_line_or_field_of_json_logs_and_is_preserved(nasty: str) -> None:
    call = Call("prelunet.v1.PreluNetService/Classify", "id-1", peer=nasty, status="INTERNAL", error=nasty)
    with written("json") as stream:
        log_call(call, 0.5)
        logs.log.info("%s", nasty)
    first, second = lines(stream.getvalue())
    assert first.isascii()
    fields = json.loads(first)
    assert (fields["peer"], fields["error"], fields["status"], fields["message"]) == (
        nasty,
        nasty,
        "INTERNAL",
        "call ended",
    )
    assert json.loads(second)["message"] == nasty
    assert set(json.loads(second)) == {"time", "level", "logger", "message"}


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("nasty", [*NASTY, "m" * 5000], ids=lambda nasty: ascii(nasty)[:30])
def test_an_invented_method_name_is_one_field_of_bounded_length(nasty: str, form: str) -> None:
    call = Call(f"nobody/{nasty}", "id-1", peer="p", status="UNIMPLEMENTED")

    def during_the_call() -> str:
        current_call.set(call)
        with written(form) as stream:
            log_call(call, 0.5)
        return stream.getvalue()

    (line,) = lines(copy_context().run(during_the_call))
    fields = json.loads(line) if form == "json" else pairs(line)
    assert set(fields) - {"time", "level", "logger", "message"} == {"request_id", "method", "peer", "status", "seconds"}
    assert (fields["status"], fields["request_id"]) == ("UNIMPLEMENTED", "id-1")
    assert line.isprintable()
    assert len(fields["method"].strip('"')) <= MAX_FIELD
    if form == "json":
        assert fields["method"] == (
            call.method if len(call.method) <= MAX_FIELD else call.method[: MAX_FIELD - 1] + "…"
        )


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_traceback_of_an_incident_has_its_id_and_stays_within_its_record(form: str) -> None:
    with written(form) as stream:
        try:
            raise RuntimeError(f"broken\n{FORGERY}\x1b[2J")
        except RuntimeError as error:
            incident = log_incident(error)
    output = lines(stream.getvalue())
    assert re.fullmatch("[0-9a-f]{12}", incident)
    assert f"incident {incident}: RuntimeError" in output[0]
    if form == "json":
        (line,) = output
        assert "test_logs.py" in json.loads(line)["traceback"]
        assert json.loads(line)["traceback"].endswith(f"RuntimeError: broken\n{FORGERY}\x1b[2J")
    else:
        assert all(line.startswith("    | ") and line.isprintable() for line in output[1:])
        assert f"    | {FORGERY}\\x1b[2J" in output
        assert any("test_logs.py" in line for line in output)


def test_an_error_of_the_caller_is_not_logged_as_an_incident() -> None:
    with written("text") as stream:
        log_incident(ImageError("no image"))
    assert stream.getvalue() == ""


@pytest.mark.parametrize("form", ["text", "json"])
def test_long_texts_are_truncated(form: str) -> None:
    call = Call("m", "id", status="OK", error="e" * 100_000)
    with written(form) as stream:
        log_call(call, 0.5)
        logs.log.info("m" * 100_000)
        try:
            raise RuntimeError("t" * 100_000)
        except RuntimeError as error:
            log_incident(error)
    text = stream.getvalue()
    assert [text.count(letter * limit) for letter, limit in (("e", MAX_FIELD - 1), ("m", MAX_LOG_MESSAGE - 1))] == [
        1,
        1,
    ]
    assert ("e" * MAX_FIELD not in text, "m" * MAX_LOG_MESSAGE not in text) == (True, True)
    assert (
        MAX_TRACEBACK <= len(text.replace("e" * (MAX_FIELD - 1), "").replace("m" * (MAX_LOG_MESSAGE - 1), "")) < 22_000
    )


def test_the_log_line_of_a_call_has_its_request_and_status() -> None:
    call = Call("prelunet.v1.PreluNetService/ClassifyStream", "id-1", peer="ipv4:127.0.0.1:5", status="OK", bytes=812)

    def during_the_call() -> dict:
        current_call.set(call)
        for model, views in (("roses", 6), ("tulips", 2), ("roses", 1)):
            call.record_views(model, views)
        with written("json") as stream:
            log_call(call, 0.0123456789)
        return json.loads(stream.getvalue())

    line = copy_context().run(during_the_call)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "INFO",
        "logger": "prelunet.evaluator.serving.observability.logs",
        "message": "call ended",
        "request_id": "id-1",
        "method": "prelunet.v1.PreluNetService/ClassifyStream",
        "peer": "ipv4:127.0.0.1:5",
        "status": "OK",
        "seconds": 0.012346,
        "model": "roses,tulips",
        "views": 9,
        "bytes": 812,
    }


@pytest.mark.parametrize("form", FORMATTERS)
def test_the_line_of_a_call_is_the_same_past_the_logging_module(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our handler is given the line directly, if it is in use."""
    reading, writing = os.pipe()
    handler, call = StderrHandler(form, writing), Call("m", "id-1", peer=NASTY[0], error="e" * 1000, models={"a", "b"})
    call.trace = SimpleNamespace(exemplar={"trace_id": "abc"})  # type: ignore[assignment]

    def log_twice() -> list[str]:
        current_call.set(call)
        with written(form) as stream:
            log_call(call, 0.5)
        monkeypatch.setattr(logs, "_handler", handler)
        with written(form):  # for the level
            monkeypatch.setattr(logging.root, "handlers", [handler])
            log_call(call, 0.5)
            monkeypatch.undo()
        handler.flush()
        os.close(writing)
        with os.fdopen(reading) as direct:
            return [
                re.sub(r"\d{4}-\d\d-\d\dT[0-9:.]+Z", "TIME", text, count=1)
                for text in (stream.getvalue(), direct.read())
            ]

    through_logging, directly = copy_context().run(log_twice)
    assert directly == through_logging
    assert "TIME" in directly


PROGRAM = """
import logging, sys, warnings
from prelunet.evaluator.serving.observability.logs import configure_logging
configure_logging({form!r}, {level!r})
logging.getLogger("prelunet.some.module").debug("ours, debug")
logging.getLogger("prelunet.some.module").info("ours, info")
logging.getLogger("PIL.PngImagePlugin").debug("STREAM of an image")
logging.getLogger("PIL.PngImagePlugin").warning("what is wrong with an image")
logging.getLogger("onnxruntime").warning("of a library")
logging.getLogger("grpc._cython.cygrpc").error("Invalid encoding on %s", b"\\xff")
logging.getLogger("grpc._cython.cygrpc").error("Unexpected [UnicodeDecodeError] raised by servicer method [/\xff]")
logging.getLogger("grpc._cython.cygrpc").error("a mistake of gRPC's")
warnings.warn("\\n".join(["first line", "second " "line"]))  # Python 3.13 quotes this line, too
"""


@pytest.mark.parametrize(
    ("form", "level", "expected"), [("text", "INFO", ["ours, info"]), ("json", "DEBUG", ["ours, debug", "ours, info"])]
)
def test_our_loggers_have_the_given_level_and_libraries_except_pillow_log_from_warning(
    form: str, level: str, expected: list[str]
) -> None:
    program = PROGRAM.format(form=form, level=level)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == ""
    if form == "json":
        messages = [json.loads(line)["message"] for line in lines(result.stderr)]
    else:
        messages = [line.partition(" | ")[2] for line in lines(result.stderr)]
    assert messages[:-1] == [*expected, "of a library", "a mistake of gRPC's"]
    assert "UserWarning: first line" in messages[-1]
    assert messages[-1].count("second line") == 1


def test_a_log_that_is_not_read_blocks_nothing_and_counts_the_dropped_lines() -> None:
    reading, writing = os.pipe()
    handler = StderrHandler("json", writing)
    logger = logging.Logger("a test's")
    logger.addHandler(handler)
    total = 3 * MAX_QUEUED_LINES
    for number in range(total):
        logger.warning("line %s %s", number, "x" * 200)  # a pipe holds 64 KiB, 200 of these
    received: list[str] = []

    def read() -> None:
        with os.fdopen(reading) as stream:
            received.extend(json.loads(line)["message"] for line in stream)

    reader = threading.Thread(target=read)
    reader.start()
    handler.flush()
    logger.warning("read again")
    handler.flush()
    os.close(writing)
    reader.join(30)
    numbers = [int(message.split()[1]) for message in received if message.startswith("line ")]
    dropped = [int(message.split()[0]) for message in received if "lines dropped: stderr is read too slowly" in message]
    assert MAX_QUEUED_LINES <= len(numbers) < total
    assert numbers == sorted(set(numbers))
    assert sum(dropped) == total - len(numbers)
    assert received[-1] == "read again"


def test_a_log_without_a_reader_blocks_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    handler = StderrHandler(descriptor=writing)
    logger = logging.Logger("a test's")
    logger.addHandler(handler)
    for _ in range(3):
        logger.warning("to nobody")
    handler.flush()
    os.close(writing)


def test_a_process_whose_log_is_not_read_still_exits() -> None:
    program = (
        "import logging; from prelunet.evaluator.serving.observability.logs import configure_logging\n"
        "configure_logging()\n"
        "for _ in range(5000): logging.getLogger('prelunet').info('x' * 200)\n"
        "print('done')"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.read() == b"done\n"  # the process has ended, though nobody reads stderr
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def ended_calls(*calls: Call, sampled: bool = False, wait: bool = True) -> list[dict[str, Any]]:
    """Return the log lines of calls that end one after the other. wait: leave the log open."""

    async def end() -> None:
        log = CallLog(sampled=sampled)
        for seconds, call in enumerate(calls):
            copy_context().run(lambda call=call, seconds=seconds: (current_call.set(call), log.ended(call, seconds)))
        if not wait:
            log.close()
        await asyncio.sleep(2.5 * logs.REPEAT_INTERVAL)

    with written("json") as stream:
        asyncio.run(end())
    return [json.loads(line) for line in lines(stream.getvalue())]


def refused(number: int, error: str = "Try again in {} s", **changes: Any) -> Call:
    fields = {"peer": "ipv4:10.0.0.7:1", "status": "RESOURCE_EXHAUSTED", "error": error.format(number), **changes}
    return Call("prelunet.v1.PreluNetService/Classify", f"id-{number}", **fields)


@pytest.mark.parametrize("wait", [True, False])
def test_repeated_failures_are_logged_once_per_interval_with_their_number(
    monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    monkeypatch.setattr(logs, "REPEAT_INTERVAL", 0.05)
    first, last = ended_calls(*(refused(number) for number in range(40)), wait=wait)
    assert (first["request_id"], first["error"], "calls" in first) == ("id-0", "Try again in 0 s", False)
    assert (last["request_id"], last["error"], last["seconds"]) == ("id-39", "Try again in 39 s", 39)
    assert last["calls"] == 39, "each call is in one line, or counted by one"


def test_failures_that_differ_and_answered_calls_are_each_logged() -> None:
    different = [
        refused(1),
        refused(2, peer="ipv4:10.0.0.8:1"),
        refused(3, status="UNAVAILABLE"),
        refused(4, error="another error"),
        *(refused(number, status="OK", error="") for number in range(5, 8)),
    ]
    found = ended_calls(*different, wait=False)
    assert [line["request_id"] for line in found] == [f"id-{number}" for number in range(1, 8)]


def test_answered_calls_are_logged_once_per_interval_on_request() -> None:
    calls = [refused(n, status="OK", error="", identity=f"token:{n % 2}") for n in range(10)]
    found = ended_calls(*calls, sampled=True, wait=False)
    assert [(line["request_id"], line["client"], line.get("calls", 1)) for line in found] == [
        ("id-0", "token:0", 1),
        ("id-1", "token:1", 1),
        ("id-8", "token:0", 4),
        ("id-9", "token:1", 4),
    ]
