"""benchmarks/reliability: what its checks catch, that its damage is the same each time, and rehearsals of seconds."""

import asyncio
import hashlib
import io
import json
import struct
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from PIL import Image

from benchmarks.common.results import ROOT, environment
from benchmarks.common.server_process import MetricsSnapshot, ProcessExit
from benchmarks.reliability import bad_clients, deadlines, faults, memory, overload, run, soak
from benchmarks.reliability.cases import TIMING_CONDITIONS, Case, ServerTestBed, verdict
from benchmarks.reliability.clients import new_channel, percentiles, same_scores
from benchmarks.reliability.fuzz import fuzzing, mutation
from benchmarks.reliability.fuzz.fuzz_cases import SERVICES, FuzzCase, case_of, methods
from benchmarks.reliability.mixed import KINDS, Mix
from benchmarks.reliability.pictures import encoded, hostile_pictures, made_pictures, pixels
from benchmarks.reliability.table import BEGIN, END, filled, not_held, summary, table
from prelunet.evaluator.errors import ImageError
from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.api.interceptor import CallsInFlight
from tests.serving.serving_harness import running_servicer

# What is decided from numbers


def test_a_verdict_holds_where_every_condition_does_and_names_those_that_do_not() -> None:
    assert verdict({"a": True, "b": True}, n=1) == {"held": True, "n": 1}
    assert verdict({"a": True, "b": False, "c": False}) == {"held": False, "broken": ["b", "c"]}


@pytest.mark.parametrize(
    ("samples", "growth"),
    [
        ([100.0 + 3 * n for n in range(200)], 240),  # the medians of samples 100 to 119 and 180 to 199
        ([100.0 + 10 * min(n, 50) for n in range(200)], 0),  # warming up, then level
        ([100.0] * 199 + [5000.0], 0),  # one sample is no growth
        ([500.0] * 100 + [100.0] * 100, 0),
        ([100.0, 130.0], 0),
        ([100.0, 130.0, 190.0], 60),
    ],
)
def test_growth_is_that_of_the_second_half_of_a_run(samples: list[float], growth: float) -> None:
    assert memory.growth_of(samples) == growth


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles([]) == {}
    assert percentiles([0.001 * n for n in range(1, 101)]) == {"p50_ms": 51, "p99_ms": 100, "max_ms": 100}


def test_answers_are_the_same_up_to_rounding_only() -> None:
    assert same_scores({1: 0.5, 2: 0.25}, {1: 0.50001, 2: 0.25})
    assert not same_scores({1: 0.5, 2: 0.25}, {1: 0.501, 2: 0.25})
    assert not same_scores({1: 0.5}, {2: 0.5})


def test_metrics_are_summed_over_the_labels_that_are_not_named() -> None:
    metrics = MetricsSnapshot(
        '# TYPE prelunet_dropped_views counter\nprelunet_dropped_views_total{model="a",reason="expired"} 2.0\n'
        'prelunet_dropped_views_total{model="a",reason="failed"} 3.0\n'
        'prelunet_dropped_views_total{model="b",reason="expired"} 5.0\n'
        "# TYPE prelunet_calls_now gauge\nprelunet_calls_now 1.0\n"
        '# TYPE prelunet_waiting_views gauge\nprelunet_waiting_views{model="a"} 0.0\n'
    )
    assert metrics("dropped_views_total", model="a") == 5
    assert metrics("dropped_views_total", reason="expired") == 7
    assert metrics("dropped_views_total", model="c") == 0
    assert metrics.in_flight() == {"calls_now": 1}


def test_errors_in_a_log_are_told_from_what_libraries_write_there() -> None:
    lines = [
        {"level": "WARNING", "logger": "prelunet.evaluator.serving", "message": "a"},
        {"level": "ERROR", "logger": "prelunet.evaluator.serving", "message": "b"},
        {"level": "ERROR", "logger": "PIL.TiffImagePlugin", "message": "c"},
        {"level": "CRITICAL", "logger": "prelunet.evaluator.serving.lifecycle", "message": "d"},
    ]
    log = "\n".join(["TIFFReadDirectory: odd", "", *map(json.dumps, lines), "[1, 2]"])
    ended = ProcessExit(0, "", log)
    assert [json.loads(line)["message"] for line in ended.errors] == ["b", "d"]
    assert len(ended.foreign) == 3


# The damage


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_and_a_number_give_the_same_bytes_in_every_process(hash_seed: str) -> None:
    script = (
        "import hashlib; from benchmarks.reliability.fuzz.fuzz_cases import case_of\n"
        "print(hashlib.sha256(repr([case_of(5, n) for n in range(300)]).encode()).hexdigest())"
    )
    variables = {**environment(), "PYTHONHASHSEED": hash_seed}
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=variables)
    expected = hashlib.sha256(repr([case_of(5, number) for number in range(300)]).encode()).hexdigest()
    assert told.stdout.strip() == expected


def test_other_seeds_and_other_numbers_give_other_bytes() -> None:
    assert len({case_of(seed, number).messages for seed in (1, 2) for number in range(50)}) > 85  # some ask for nothing


def test_the_cases_reach_every_method_of_both_services_with_messages_and_pictures() -> None:
    cases = [case_of(1, number) for number in range(2000)]
    assert {case.method for case in cases} == {method.path for method in methods()}
    assert {path.split("/")[1] for path in {case.method for case in cases}} == set(SERVICES)
    kinds = Counter(case.what.partition(":")[0] for case in cases)
    assert kinds["picture"] > 1000
    assert kinds["message"] > 600
    shown = {case.what for case in cases if case.what.startswith("picture")}
    assert len(shown) > 0.8 * (len(made_pictures()) + len(hostile_pictures()))


def test_damaged_messages_are_some_readable_and_some_not_and_most_are_changed() -> None:
    readable: Counter[bool] = Counter()
    good = pb.ClassifyRequest(image=b"x" * 40, protocol="center", top_k=3, scales=[28, 40])
    changed = 0
    for number in range(300):
        rng, message = Random(number), pb.ClassifyRequest()
        message.CopyFrom(good)
        mutation.damage_message(rng, message, [b"", b"y"])
        changed += message != good
        try:
            pb.ClassifyRequest.FromString(mutation.odd_wire(rng, message.SerializeToString()))
            readable[True] += 1
        except DecodeError:
            readable[False] += 1
    assert changed > 250
    assert min(readable.values()) > 50


@pytest.mark.parametrize("damage", sorted(set(mutation.ANY_BYTES), key=lambda one: one.__name__))
def test_every_kind_of_damage_takes_any_bytes_and_mostly_changes_them(damage: mutation.Damage) -> None:
    for data in (b"a", b"ab", bytes(range(256)) * 3):
        results = [damage(Random(number), data) for number in range(40)]
        assert all(isinstance(result, bytes) for result in results)
    assert sum(result != data for result in results) > 30


def test_check_sums_of_a_png_are_made_right_and_a_chunk_beyond_the_end_is_left_alone() -> None:
    good = encoded(pixels(20, 30, 1), "PNG")
    place = good.index(b"IHDR") + 4
    damaged = good[:place] + struct.pack(">I", 60) + good[place + 4 :]  # a wider picture, of which pixels are missing
    mended = mutation.with_right_sums(damaged)
    assert mended != damaged
    for name in (b"IHDR", b"IDAT", b"IEND"):
        begin = mended.index(name)
        (length,) = struct.unpack_from(">I", mended, begin - 4)
        (told,) = struct.unpack_from(">I", mended, begin + 4 + length)
        assert told == zlib.crc32(mended[begin : begin + 4 + length])
    with Image.open(io.BytesIO(mended)) as image:
        assert image.size == (60, 20)
    assert mutation.with_right_sums(good) == good
    assert mutation.with_right_sums(good[:-2])[:-2] == good[:-4]


def test_made_pictures_are_good_pictures_of_many_formats() -> None:
    formats = set()
    for picture in made_pictures():
        with Image.open(io.BytesIO(picture.data)) as image:
            image.load()
            formats.add(image.format)
    assert {"JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "MPO", "PPM", "ICO", "JPEG2000"} <= formats


# What fuzzing counts as wrong


@pytest.mark.parametrize(
    ("status", "inside", "seconds", "wrong"),
    [
        ("OK", ["OK", "INVALID_ARGUMENT"], 1, 0),
        ("INVALID_ARGUMENT", [], 1, 0),
        ("INTERNAL", [], 1, 1),
        ("UNKNOWN", [], 1, 1),
        ("UNAVAILABLE", [], 1, 1),
        ("OK", ["INTERNAL", "OK", "UNKNOWN"], 1, 2),
        ("DEADLINE_EXCEEDED", [], 1, 0),  # the request itself asked for a moment
        ("DEADLINE_EXCEEDED", [], fuzzing.CALL_TIMEOUT, 1),
    ],
)
def test_what_no_caller_can_bring_about_is_wrong_and_so_is_no_answer(
    status: str, inside: list[str], seconds: float, wrong: int
) -> None:
    tally = fuzzing.FuzzResults()
    fuzzing.count_result(tally, 7, status, inside, seconds)
    assert [number for number, _ in tally.wrong] == [7] * wrong
    assert tally.slowest == (seconds, 7)


class Planted(pb_grpc.PreluNetServiceServicer):
    """Has a mistake of ours at every call."""

    async def Classify(self, request, context):  # noqa: N802
        raise ZeroDivisionError

    async def ClassifyStream(self, request_iterator, context):  # noqa: N802
        async for request in request_iterator:
            code = 13 if request.id == "bad" else 0
            yield pb.ClassifyStreamResponse(id=request.id, error=pb.CallError(code=code))
        raise ImageError("the end")


def test_the_status_of_a_call_and_those_inside_of_a_stream_are_seen() -> None:
    path = "/prelunet.v1.PreluNetService/"
    messages = tuple(pb.ClassifyStreamRequest(id=one).SerializeToString() for one in ("good", "bad"))

    async def outcomes(address: str) -> list[Any]:
        async with new_channel(address) as channel:
            cases = [FuzzCase(0, f"{path}Classify", (b"",), ""), FuzzCase(1, f"{path}ClassifyStream", messages, "")]
            return [await fuzzing.call_case(channel, case) for case in cases]

    with running_servicer(Planted(), CallsInFlight()) as address:
        single, stream = asyncio.run(outcomes(address))
    assert single == ("INTERNAL", [])
    assert stream == ("INVALID_ARGUMENT", ["OK", "INTERNAL"])


def test_a_mistake_of_ours_inside_a_stream_of_the_open_protocol_is_told_from_a_refusal() -> None:
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    texts = ("", "images[0]: no image", "internal server error; the server's log has the details under id 12")
    found = [
        fuzzing.image_status_of(path, oip.ModelStreamInferResponse(error_message=text).SerializeToString())
        for text in texts
    ]
    assert found == [["OK"], ["refused"], ["INTERNAL"]]


def test_a_call_that_ends_as_its_kind_should_not_is_told() -> None:
    async def both(address: str) -> Mix:
        mix = Mix(3, "demo")
        async with new_channel(address) as channel:
            for kind in ("good", "odd", "impatient", "cancelled"):
                await mix.call(channel, kind)
        return mix

    with running_servicer(Planted(), CallsInFlight()) as address:
        mix = asyncio.run(both(address))
    assert {text.partition(":")[0] for text in mix.wrong} >= {"good", "odd"}
    assert mix.counts == dict.fromkeys(("good", "odd", "impatient", "cancelled"), 1)
    assert {kind for kind, (_, _, expected) in KINDS.items() if not expected} == set()


# The script

RUN = {"date": "", "machine": {"cpu": "", "cores": 2, "memory_gb": 8}, "command": "", "tiny": False}


def claims(results: dict[str, Any], tried: list[str]) -> Any:
    """Return a group of cases with these results; an exception is raised."""

    def work(name: str) -> dict[str, Any]:
        tried.append(name)
        if isinstance(results[name], Exception):
            raise results[name]
        return results[name]

    return lambda bed: [
        Case(name, f"{name} | works", {"seed": bed.seed}, 0, lambda name=name: work(name)) for name in results
    ]


def test_the_script_writes_each_verdict_and_tries_no_case_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []
    results = {"one": verdict({"a": True}, calls=3, latency={"p50_ms": 1.5}), "two": verdict({"b": True}, list=[1, 2])}
    monkeypatch.setattr(run, "GROUPS", {"these": claims(results, tried)})
    words = ["--output", str(tmp_path / "r.json"), "--tiny"]
    assert run.main(words) == 0
    assert run.main(words) == 0
    assert tried == ["one", "two"]
    assert run.main([f"--output={tmp_path / 'r.json'}", "--tiny", "--seed", "2"]) == 0
    assert tried == ["one", "two", "one", "two"]
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert "| **one**: one \\| works | yes | calls 3; latency p50 ms 1.5 |" in text
    assert "`python -m benchmarks.reliability.run --tiny`" in text
    assert "`python -m benchmarks.reliability.run --tiny --seed 2`" in text
    assert str(tmp_path) not in text + (tmp_path / "r.json").read_text(encoding="utf-8")
    assert "A rehearsal" in text
    assert "4 cases" in capsys.readouterr().out


def test_a_claim_that_does_not_hold_and_one_that_cannot_be_tried_are_told_and_the_script_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"bad": verdict({"a": False, "b": True}), "broken": RuntimeError("no server"), "good": verdict({})}
    monkeypatch.setattr(run, "GROUPS", {"these": claims(results, [])})
    path = tmp_path / "r.json"
    assert run.main(["--output", str(path)]) == 1
    data = json.loads(path.read_text(encoding="utf-8"))
    assert not_held(data) == [("bad", "a"), ("broken", "RuntimeError: no server")]
    assert "NO: a" in table(data)
    assert "not tried" in table(data)
    assert "NOT held: bad: a" in capsys.readouterr().out


def test_a_page_gets_the_summary_of_all_groups_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overloads = {
        "one": verdict({"a": True}, refused=3, refusals={"max_ms": 4.5}),
        "two": verdict({"a": False}, refused=4, refusals={"max_ms": 2.5}),
        "streams": verdict({"a": True}, refused=0),
    }
    groups = {
        "overload": claims(overloads, []),
        "memory": claims({"m": verdict({}, growth_mb=7)}, []),
        "fuzz": claims({}, []),
    }
    monkeypatch.setattr(run, "GROUPS", groups)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    words = ["--output", str(tmp_path / "r.json"), "--page", str(page)]
    for _ in range(2):  # what is there already is replaced
        assert run.main([*words, "--only", "overload", "memory", "fuzz"]) == 1
    before, row, *_ = told = page.read_text(encoding="utf-8").splitlines()
    assert (before, row, told[-2:]) == ("before", BEGIN, [END, "after"])
    assert "`python -m benchmarks.reliability.run --only overload memory fuzz`" in told[2]
    assert "| `overload` | 2 of 3 | refusals 7; slowest refusal, ms 4.5 | 0 |" in told
    assert any(line.startswith("| `memory` | 1 of 1 | growth") and " 7 | " in line for line in told)
    assert "| `fuzz` | not tried |  | 0 |" in told
    assert "old" not in told
    with pytest.raises(SystemExit, match="no place for the summary"):
        filled("nothing", "text")


def test_the_page_of_the_project_has_a_place_for_the_summary_and_says_where_each_group_is_read() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert filled(page, "here").count("\nhere\n") == 1
    assert [group for group in run.GROUPS if f"\n| `{group}` | " not in page.partition(BEGIN)[0]] == []
    assert [group for group in run.GROUPS if f"| `{group}`: " not in page.partition(BEGIN)[0]] == []
    assert summary({"runs": [RUN], "cases": []}, run.GROUPS).count("not tried") == len(run.GROUPS)


def test_what_did_not_hold_before_a_change_counts_no_more_once_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--output", str(tmp_path / "r.json")]
    for source, holds, expected in (("before", False, 1), ("before", True, 1), ("after", True, 0)):
        monkeypatch.setattr(run, "digest_of", lambda *_, source=source: source)
        monkeypatch.setattr(run, "GROUPS", {"these": claims({"one": verdict({"a": holds})}, [])})
        assert run.main(words) == expected
    assert "NO: a" not in (tmp_path / "r.md").read_text(encoding="utf-8")


def test_no_two_cases_have_the_same_settings() -> None:
    bed = ServerTestBed(tiny=False)
    bed.__enter__()
    try:
        cases = [case for group in run.GROUPS.values() for case in group(bed)]
    finally:
        bed.__exit__(None, None, None)
    assert len({json.dumps({"case": case.name, **case.settings}) for case in cases}) == len(cases) > 30
    assert sum(case.seconds for case in cases) < run.LIMIT


# Rehearsals, each with a server of its own. What a busy machine may break is not asked for.


@pytest.fixture(scope="module")
def bed(exported) -> Iterator[ServerTestBed]:
    with ServerTestBed(seed=4, tiny=True, model_file=exported["demo-channel"].path) as ready:
        yield ready


def held(bed: ServerTestBed, group: Any, name: str) -> dict[str, Any]:
    """Try the case whose name begins so; it should hold but for what depends on the machine's speed."""
    case = next(case for case in group.cases(bed) if case.name.startswith(name))
    result = dict(case.work())
    assert set(result.get("broken", ())) <= TIMING_CONDITIONS, result
    return result


def test_a_full_queue_is_seen_to_refuse_exactly_the_surplus(bed: ServerTestBed) -> None:
    result = held(bed, overload, "overload, views, 8 + 5, center")
    assert (result["refused"], result["answered"]) == (5, 8)
    assert (result["second_client_refused"], result["second_client_answered"]) == (2, 2)


def test_gone_calls_are_seen_to_be_dropped_exactly(bed: ServerTestBed) -> None:
    result = held(bed, deadlines, "deadlines")
    assert result["dropped_views"] == result["expected_dropped_views"] > 100


def test_neighbours_of_scores_that_are_none_are_seen_to_be_answered(bed: ServerTestBed) -> None:
    assert held(bed, faults, "fault: nan")["status_of_the_one"] == ["FAILED_PRECONDITION"]


def test_a_server_that_leaks_is_caught(bed: ServerTestBed) -> None:
    assert held(bed, memory, "memory, a server that leaks")["growth_mb"] > memory.LIMIT


def test_a_server_that_dies_of_one_picture_is_caught_and_the_case_is_named(bed: ServerTestBed) -> None:
    result = held(bed, fuzzing, "fuzz, a server that crashes")
    assert result["held"], result
    assert result["named"] == [result["deadly_case"]]


def test_idle_connections_are_seen_to_leave_nothing(bed: ServerTestBed) -> None:
    assert held(bed, bad_clients, "idle")["open_files_more"] >= 50


def test_a_soak_goes_through_its_scenarios(bed: ServerTestBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bed, "soak_seconds", 2.0)
    assert held(bed, soak, "soak")["calls"] > 0
