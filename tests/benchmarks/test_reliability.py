"""benchmarks/reliability: rehearsals of a few seconds, and the controls that must be caught."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.common.results import ROOT, environment
from benchmarks.reliability import attacks, bad_clients, deadlines, faults, memory, overload, run, soak
from benchmarks.reliability.cases import TIMING_CONDITIONS, ServerTestBed
from benchmarks.reliability.fuzz import fuzzing
from benchmarks.reliability.fuzz.fuzz_cases import case_of, methods
from benchmarks.reliability.table import BEGIN, END, filled


@pytest.fixture(scope="module")
def bed(exported) -> Iterator[ServerTestBed]:
    with ServerTestBed(seed=4, tiny=True, model_file=exported["demo-channel"].path) as ready:
        yield ready


def held(bed: ServerTestBed, group: Any, name: str) -> dict[str, Any]:
    """Run the case whose name begins so; every condition must hold, except those that a busy machine may break."""
    case = next(case for case in group.cases(bed) if case.settings["case"].startswith(name))
    result = dict(case.work())
    assert set(result.get("broken", ())) <= TIMING_CONDITIONS, result
    return result


def test_a_full_queue_refuses_exactly_the_surplus(bed: ServerTestBed) -> None:
    result = held(bed, overload, "overload, views, 8 + 5, center")
    assert (result["refused"], result["answered"]) == (5, 8)
    assert (result["second_client_refused"], result["second_client_answered"]) == (2, 2)


def test_exactly_the_expired_and_cancelled_calls_are_dropped(bed: ServerTestBed) -> None:
    result = held(bed, deadlines, "deadlines")
    assert result["dropped_views"] == result["expected_dropped_views"] > 100


def test_neighbors_of_an_image_with_nan_scores_are_answered(bed: ServerTestBed) -> None:
    assert held(bed, faults, "fault: nan")["status_of_the_one"] == ["FAILED_PRECONDITION"]


def test_a_server_that_leaks_is_caught(bed: ServerTestBed) -> None:
    assert held(bed, memory, "memory, a server that leaks")["growth_mb"] > memory.LIMIT


def test_a_server_that_dies_of_one_picture_is_caught_and_the_case_is_named(bed: ServerTestBed) -> None:
    result = held(bed, fuzzing, "fuzz, a server that crashes")
    assert result["held"], result
    assert result["named"] == [result["deadly_case"]]


def test_killed_clients_leave_nothing_behind(bed: ServerTestBed) -> None:
    assert held(bed, bad_clients, "killed clients")["good_calls"] > 0


def test_polite_clients_lose_no_call_beside_images_that_are_dear_for_their_bytes(bed: ServerTestBed) -> None:
    result = held(bed, attacks, "few pixels, expensive bytes, another address")
    assert {"OK", "INVALID_ARGUMENT"} <= set(result["statuses"])


def test_polite_clients_lose_no_call_beside_large_views(bed: ServerTestBed) -> None:
    assert held(bed, attacks, "large views, refused, another address")["statuses"]["OK"] > 0


def test_a_soak_runs_its_scenarios(bed: ServerTestBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bed, "soak_seconds", 1.0)
    assert held(bed, soak, "soak")["calls"] > 0


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_and_a_number_give_the_same_fuzzing_case_in_every_process(hash_seed: str) -> None:
    script = (
        "import hashlib; from benchmarks.reliability.fuzz.fuzz_cases import case_of\n"
        "print(hashlib.sha256(repr([case_of(5, n) for n in range(300)]).encode()).hexdigest())"
    )
    variables = {**environment(), "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=variables)
    expected = hashlib.sha256(repr([case_of(5, number) for number in range(300)]).encode()).hexdigest()
    assert done.stdout.strip() == expected


def test_the_fuzzing_cases_reach_every_method_of_both_services() -> None:
    cases = [case_of(1, number) for number in range(2000)]
    assert {case.method for case in cases} == {method.path for method in methods()}
    assert len({case.messages for case in cases}) > 1700  # some methods take no fields


def test_no_two_cases_have_the_same_settings_and_the_page_describes_each_group() -> None:
    with ServerTestBed(tiny=False) as bed:
        cases = [case for group in run.GROUPS.values() for case in group(bed)]
    assert len({json.dumps(case.settings) for case in cases}) == len(cases) > 30
    assert sum(case.seconds for case in cases) < run.LIMIT
    page = (ROOT / "benchmarks" / "reliability" / "README.md").read_text(encoding="utf-8")
    assert filled(page, "here").count(f"{BEGIN}\nhere\n{END}") == 1
    described = page.partition(BEGIN)[0]
    assert all(f"\n| `{group}` | " in described and f"| `{group}`: " in described for group in run.GROUPS)
