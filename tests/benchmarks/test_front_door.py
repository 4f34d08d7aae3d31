"""benchmarks/front_door: the verdicts, and a rehearsal."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.front_door import run as front_door
from benchmarks.front_door.table import goals_of


def one_case(**rates: list[float]) -> dict[str, Any]:
    """Return the data of a result file with one case. rates: by door, `_` for `, `."""
    contenders = {door.replace("_", ", "): {"failed": 0, "rates": each} for door, each in rates.items()}
    settings = {"part": "speed", "net": "demo", "protocol": "center", "clients": 16}
    return {
        "runs": [{"tiny": False}],
        "cases": [{"run": 0, "settings": settings, "result": {"contenders": contenders}}],
    }


def test_each_door_meets_its_goal_or_misses_it_and_failed_calls_meet_none() -> None:
    data = one_case(gRPC=[100.0, 80.0, 90.0], HTTP=[95.0, 76.0, 85.5], gRPC_TLS=[85.0, 68.0, 76.5])
    http, tls = goals_of(data)
    assert http.startswith("- met: demo, center: 16 clients: HTTP ÷ gRPC, calls/s at least 0.9; measured 0.950")
    assert tls.startswith("- NOT met: demo, center: 16 clients: gRPC, TLS ÷ gRPC, calls/s at least 0.9; measured 0.850")
    data["cases"][0]["result"]["contenders"]["gRPC"]["failed"] = 2
    assert all(
        line.startswith("- NOT met") and line.endswith("2 calls of that table failed") for line in goals_of(data)
    )


def test_the_benchmark_of_the_front_door_runs_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "front-door.json"
    assert front_door.main(["--tiny", "--part", "speed", "--output", str(output)]) == 0
    for result in (case["result"] for case in json.loads(output.read_text())["cases"]):
        assert set(result["contenders"]) == {"gRPC", "HTTP", "gRPC, TLS", "HTTP, TLS"}
        for door, one in result["contenders"].items():
            assert (one["calls"], one["failed"]) == (8, 0), door
    text = output.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    assert "- none measured" in text
