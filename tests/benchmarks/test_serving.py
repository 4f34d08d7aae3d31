"""benchmarks/serving/run.py: what it counts, what it refuses to count, and a rehearsal without the peers."""

import ast
import asyncio
import io
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from benchmarks.common.results import ROOT
from benchmarks.common.rig import Rig
from benchmarks.serving import run as serving
from benchmarks.serving.bench import (
    Pictures,
    ServingBench,
    TurnResult,
    calls_for,
    check_answers,
    interleave,
    percentile,
    summary,
)
from benchmarks.serving.engine import InMemoryReader
from benchmarks.serving.load import Workload, best_of_all, run
from benchmarks.serving.peer_classifier import Classifier
from benchmarks.serving.peers import Server, Spec, free_port
from benchmarks.serving.table import fastest_way, goals_of, ratio, tables
from benchmarks.serving.worker import Worker
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.protocols import build_protocol
from tests.serving.serving_harness import running_server

SIZES = ((40, 57), (57, 40), (33, 61), (40, 57))


def jpeg(height: int, width: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


IMAGES = [jpeg(*size, seed) for seed, size in enumerate(SIZES)]


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 250])
@pytest.mark.parametrize("share", [50, 99, 100])
def test_a_percentile_is_the_smallest_value_that_so_many_percent_do_not_exceed(count: int, share: int) -> None:
    values = sorted(np.random.default_rng(count).integers(0, 50, count).tolist())
    expected = next(value for value in values if sum(one <= value for one in values) >= share * count / 100)
    assert percentile(values, share) == expected


def test_a_summary_pools_the_latencies_of_all_rounds_and_keeps_the_rate_of_each() -> None:
    first = TurnResult(4, 2.0, cpu=0.4, client_cpu=0.1, latencies=(0.5, 0.1, 0.2, 0.3))
    second = TurnResult(4, 1.0, cpu=0.2, client_cpu=0.1, latencies=(0.9, 0.05, 0.06, 0.07), errors=("gone", "again"))
    found = summary([first, second])
    assert found["rates"] == [2, 4]
    assert found["calls"] == 8
    assert found["cpu_ms"] == pytest.approx(75)
    assert found["client_cpu_ms"] == pytest.approx(25)
    assert found["p50_ms"] == pytest.approx(100)  # the fourth of eight
    assert found["p99_ms"] == pytest.approx(900)
    assert (found["failed"], found["first_error"]) == (2, "gone")
    engine = summary([TurnResult(10, 5.0, cpu=10.0)])
    assert "p50_ms" not in engine
    assert "first_error" not in engine


def test_all_contenders_have_a_turn_each_round_with_as_many_calls_in_changing_order() -> None:
    asked: list[tuple[str, int, int]] = []

    def contender(name: str) -> Any:
        return lambda calls, number: asked.append((name, calls, number)) or TurnResult(calls, 1.0, 0.0)

    names = ("one", "two", "three", "four")
    interleave({name: contender(name) for name in names}, 7, 5)
    rounds = [asked[start : start + 4] for start in range(0, 20, 4)]
    assert len(asked) == 20
    for number, of_round in enumerate(rounds):
        assert sorted(of_round) == sorted((name, 7, number) for name in names)
    assert len({tuple(name for name, _, _ in of_round) for of_round in rounds}) > 1


def test_a_turn_has_whole_rounds_of_clients_and_no_less_than_the_least() -> None:
    slow = TurnResult(32, 8.0, 0.0)  # four a second
    assert calls_for(10, slow, clients=16, minimum=32) == 48
    assert calls_for(1, slow, clients=16, minimum=32) == 32
    assert calls_for(1, slow, clients=16, minimum=33) == 48


def test_answers_that_differ_stop_the_benchmark() -> None:
    right = [[(3, 0.5), (1, 0.25)], [(2, 0.75), (0, 0.125)]]
    assert check_answers("x", [[(3, 0.50005), (1, 0.25)], right[1]], right) == pytest.approx(5e-5)
    for wrong in (
        [[(3, 0.5), (1, 0.2502)], right[1]],
        [[(1, 0.5), (3, 0.25)], right[1]],
        [right[0], [(2, math.nan), (0, 0.125)]],
        right[:1],
    ):
        with pytest.raises(SystemExit, match="x: its answers differ from the engine's"):
            check_answers("x", wrong, right)


def test_the_ratio_is_of_the_same_round() -> None:
    median, error = ratio([10, 40, 9], [20, 20, 10])
    assert median == pytest.approx(0.9)  # of 0.5, 2 and 0.9, not of the medians 10 and 20
    assert error == pytest.approx(math.sqrt(math.pi / 2 / 3) * statistics.stdev([0.5, 2, 0.9]))
    assert ratio([3], [4]) == (0.75, None)


class Slow(pb_grpc.PreluNetServiceServicer):
    """Answers at the third call that waits, or when it is told to; counts who is in flight."""

    def __init__(self, together: int) -> None:
        self.seen: list[bytes] = []
        self.peers: set[str] = set()
        self.most = 0
        self._in_flight = 0
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(together)

    def Classify(self, request: pb.ClassifyRequest, context: grpc.ServicerContext) -> pb.ClassifyResponse:  # noqa: N802
        with self._lock:
            self.seen.append(request.image)
            self.peers.add(context.peer())
            self._in_flight += 1
            self.most = max(self.most, self._in_flight)
        self._barrier.wait(30)
        with self._lock:
            self._in_flight -= 1
        if request.image == b"bad":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no image")
        return pb.ClassifyResponse(predictions=[pb.Prediction(class_index=3, score=0.5)])


@contextmanager
def answering(servicer: Slow) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(16))
    pb_grpc.add_PreluNetServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def load(address: str, **changes: Any) -> Workload:
    return replace(Workload(address, "Classify", "", "center", 1, 1, 0, time.monotonic()), **changes)


def test_clients_of_a_closed_loop_are_connections_of_their_own_that_are_all_busy() -> None:
    servicer = Slow(together=3)  # nobody is answered before three wait
    with answering(servicer) as address:
        calls = asyncio.run(run(load(address, clients=3, calls=9, first=1), [b"a", b"b"]))
    assert len(calls.latencies) == len(servicer.seen) == 9
    assert servicer.most == len(servicer.peers) == 3
    assert (servicer.seen.count(b"a"), servicer.seen.count(b"b")) == (4, 5)  # the second picture first
    assert calls.errors == []
    assert min(calls.latencies) > 0


def test_a_call_that_fails_is_counted_and_its_client_goes_on() -> None:
    servicer = Slow(together=1)
    with answering(servicer) as address:
        calls = asyncio.run(run(load(address, calls=4), [b"good", b"bad"]))
    assert calls.errors == ["no image", "no image"]
    assert len(calls.latencies) == 4


def test_calls_at_random_moments_wait_for_nobody_and_count_from_when_they_were_due() -> None:
    servicer = Slow(together=8)  # a client that waits for its answer before it asks again would wait for ever
    with answering(servicer) as address:
        begin_at = time.monotonic() - 5  # so that all are due and late
        calls = asyncio.run(run(load(address, clients=2, calls=8, rate=100.0, begin_at=begin_at), [b"a"]))
    assert len(servicer.peers) == 2
    assert calls.errors == []
    assert all(4 < latency < calls.ended - begin_at + 1e-6 for latency in calls.latencies)
    assert len({round(latency, 4) for latency in calls.latencies}) > 4  # due at moments of their own


@pytest.mark.parametrize("api", ["Classify", "ClassifyStream", "OIP"])
def test_every_api_of_ours_is_read_as_the_engine_answers(api: str, exported: Any) -> None:
    session = exported["demo-channel"].session
    protocol = build_protocol("dense-32", session.contract)
    expected = classify_images(session, [decode_image(image) for image in IMAGES], protocol)
    with running_server(net=session) as server:
        asked = load(server.address, api=api, model="net", protocol="dense-32")
        found = asyncio.run(best_of_all(asked, IMAGES))
        calls = asyncio.run(run(replace(asked, clients=2, calls=6), IMAGES))
    assert check_answers(api, found, [one.top(5) for one in expected]) < 1e-6  # six digits in OIP's text
    assert (len(calls.latencies), calls.errors) == (6, [])


@pytest.mark.parametrize("protocol", ["center", "dense-32", "center-40"])
def test_the_peers_classifier_gives_the_engines_answers(protocol: str, exported: Any, tmp_path: Path) -> None:
    net = exported["demo-channel"]
    how = build_protocol(protocol, net.session.contract)
    Spec(net.path, how.scales[0], how.crop, how.mirror, cores=2).write(tmp_path / "peer")
    indices, scores = Classifier(tmp_path / "peer").classify(IMAGES)  # two of one shape share a batch
    found = [list(zip(*row, strict=True)) for row in zip(indices.tolist(), scores.tolist(), strict=True)]
    expected = classify_images(net.session, [decode_image(image) for image in IMAGES], how)
    check_answers(protocol, found, [one.top(5) for one in expected])


@pytest.mark.parametrize("name", ["peer_classifier.py", "peer_mlserver.py", "peer_triton.py"])
def test_a_file_that_is_copied_to_a_peer_imports_nothing_of_this_project(name: str) -> None:
    tree = ast.parse((ROOT / "benchmarks" / "serving" / name).read_text(encoding="utf-8"))
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert imported
    assert not [module for module in imported if module.split(".")[0] in {"benchmarks", "prelunet"}]


def test_a_peers_null_model_decodes_and_answers_zeros(exported: Any, tmp_path: Path) -> None:
    Spec(exported["demo-channel"].path, 32, 28, mirror=False, cores=1, null=True).write(tmp_path / "peer")
    classifier = Classifier(tmp_path / "peer")
    _, scores = classifier.classify(IMAGES)
    assert scores.shape == (4, 5)
    assert not scores.any()
    with pytest.raises(OSError, match="cannot identify"):
        classifier.classify([b"no image"])


def test_pictures_in_memory_begin_again_after_the_last() -> None:
    dataset = InMemoryReader([b"a", b"bc"]).dataset(5)
    assert [dataset.read(sample) for sample in dataset.samples] == [b"a", b"bc", b"a", b"bc", b"a"]


def test_a_worker_that_fails_says_why_and_answers_the_next_question(exported: Any, tmp_path: Path) -> None:
    (tmp_path / "0.jpg").write_bytes(IMAGES[0])
    given = {"model": str(exported["demo-channel"].path), "threads": 1, "folder": str(tmp_path)}
    worker = Worker("benchmarks.serving.engine", json.dumps(given))
    try:
        worker.send({"best": "no-such-protocol", "images": [0]})
        with pytest.raises(RuntimeError, match=r"UsageError: .*no-such-protocol"):
            worker.receive()
        worker.send({"best": "center", "images": [0]})
        assert len(worker.receive()["best"][0]) == 5
    finally:
        worker.close()


def test_a_server_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    server = Server("a peer", command, {}, tmp_path, free_port())
    with pytest.raises(EnvironmentFault, match="a peer did not start: no such model"):
        server.wait(["x"])


def test_a_peer_that_is_not_there_is_told_and_not_asked_for_again(tmp_path: Path) -> None:
    now: dict[str, Any] = {"servers": {}, "not_measured": {}}
    pythons = {"triton": None, "mlserver": Path(sys.executable)}
    with ServingBench(Rig("cpu", True, tmp_path), tmp_path, Pictures(tmp_path, (), (), ()), 1, pythons, now) as bench:
        assert bench.peers("demo", {}) == bench.peers("demo", {}) == {}
    assert now["not_measured"] == {
        "triton": "--triton-python is not set",
        "mlserver": "its environment has no mlserver: install it with pip",
    }


def test_the_command_that_is_told_names_no_place_of_this_machine(tmp_path: Path) -> None:
    words = ["--tiny", "--triton-python", "/somewhere/bin/python", "--limit", "5"]
    assert serving._without_places(words) == ["--tiny", "--triton-python", "triton/bin/python", "--limit", "5"]


def contender(rates: list[float], **changes: Any) -> dict[str, Any]:
    told = {
        "rates": rates,
        "calls": 9,
        "cpu_ms": 2.0,
        "client_cpu_ms": 0.5,
        "p50_ms": 10.0,
        "p99_ms": 30.0,
        "failed": 0,
    }
    return {**told, **changes}


def made_up(classify: list[float], **run: Any) -> dict[str, Any]:
    """Return a result file of every part."""
    common = {"calls_of_a_turn": 3, "rounds": 3}
    engine = {"validate": contender([100, 90, 110]), "classify_images": contender([80, 95, 70])}
    beside = {"prelunet": contender([50, 50, 50]), "triton": contender([25, 20, 30], p99_ms=90.0, failed=2,
                                                                       first_error="went away")}  # fmt: skip
    cases = [
        ({"part": "throughput", "net": "A", "protocol": "center", "clients": 16, "pictures": "mixed"},
         {**common, "contenders": {**engine, "Classify": contender(classify)}, "off": {"Classify": 5e-7}}),
        ({"part": "peers", "net": "demo", "protocol": "dense-64", "pictures": "equal", "load": "closed", "clients": 4},
         {**common, "contenders": beside, "off": {"prelunet": 0.0, "triton": 1e-6}}),
        ({"part": "peers", "net": "demo", "protocol": "dense-64", "pictures": "equal", "load": "open", "clients": 16},
         {**common, "contenders": beside, "off": {}, "calls_per_second": 17.5}),
        ({"part": "overhead"}, {**common, "contenders": {"prelunet, Classify": contender([1]),
                                                         "triton, OIP": contender([1], p50_ms=5.0)}}),
        ({"part": "overhead", "peers": []}, {"error": "went wrong"}),
    ]  # fmt: skip
    circumstances = {
        "date": "2026-01-01", "command": "python -m benchmarks.serving.run", "tiny": False, "threads": 2,
        "versions": {"python": "3"}, "machine": {"cpu": "a processor", "memory_gb": 8, "instructions": ["avx2"]},
        "servers": {"triton": {"server": "triton 2", "threads": 2}}, "not_measured": {"mlserver": "not\ngiven"}, **run,
    }  # fmt: skip
    return {
        "part": "serving",
        "runs": [circumstances],
        "cases": [{"run": 0, "settings": settings, "seconds": 1, "result": result} for settings, result in cases],
    }


def test_the_goal_is_held_against_the_faster_way_in_process() -> None:
    data = made_up([99, 89, 109])
    assert fastest_way(data["cases"][0]["result"]["contenders"]) == "validate"
    (line,) = goals_of(data)
    assert line.startswith("- met: A, center: Classify with 16 clients at least 0.95 of the faster way in process")
    assert "(validate); measured 0.990 ±" in line
    (line,) = goals_of(made_up([90, 81, 99]))
    assert line.startswith("- NOT met")
    assert line.endswith("measured 0.900 ± 0")
    (line,) = goals_of(made_up([80, 90, 130]))
    assert line.endswith("not significant")
    assert goals_of(made_up([99, 89, 109], tiny=True)) == ["- none measured"]


def test_the_tables_hold_ratios_failures_settings_and_who_was_not_measured() -> None:
    text = tables(made_up([99, 89, 109]))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    by_name = {row[0]: row for row in rows}
    assert by_name["validate in process"][1:4] == ["100", "90 to 110", "1.00 ± 0.00"]
    assert by_name["Classify"][3] == "0.99 ± 0.00"
    peer = "triton (failed calls: 2, went away)"
    of_peer = [row for row in rows if row[0] == peer]
    assert [row[1:6] for row in of_peer] == [
        ["25", "20 to 30", "0.50 ± 0.07", "10", "90"],
        ["10", "90", "1", "3", "2"],  # p99 is three times ours
    ]
    assert by_name["triton, OIP"][1:5] == ["5", "30", "0.5", "1"]
    assert "17.5 calls/s at random moments" in text
    assert "- triton: server triton 2, threads 2" in text
    assert "- mlserver: not measured: not given" in text
    assert "A rehearsal" not in text
    assert "A rehearsal: the numbers mean nothing." in tables(made_up([99, 89, 109], tiny=True))


def test_the_serving_benchmark_runs_from_end_to_end_without_the_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "serving.json"
    arguments = ["--tiny", "--threads", "1", "--output", str(output)]
    assert serving.main(arguments) == 0
    data = json.loads(output.read_text())
    parts = [case["settings"]["part"] for case in data["cases"]]
    assert parts == ["throughput", "peers", "peers", "peers", "peers", "overhead"]
    for case in data["cases"]:
        for name, one in case["result"]["contenders"].items():
            assert (one["calls"], one["failed"]) == (8, 0), name
        assert all(off < 1e-4 for off in case["result"].get("off", {}).values())
    assert set(data["cases"][0]["result"]["contenders"]) == {
        "validate", "classify_images", "Classify", "ClassifyStream", "OIP"
    }  # fmt: skip
    text = output.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    assert "- triton: not measured: --triton-python is not set" in text
    assert serving.main(arguments) == 0
    assert capsys.readouterr().out.count("  kept ") == 6
    assert json.loads(output.read_text()) == data
