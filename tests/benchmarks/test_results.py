"""How results are stored, and the committed ones, read by the code of today."""

import json
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import results
from benchmarks.common.results import RESULTS, ROOT, latest
from benchmarks.common.runner import Case, Runner
from benchmarks.engine import table as engine_table
from benchmarks.gpu import table as gpu_table
from benchmarks.reliability import table as reliability_table
from benchmarks.serving import table as serving_table
from tests.helpers.doc_pages import DOCS, name_of

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")


def test_a_commit_is_dirty_when_a_source_differs_but_not_when_a_result_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    source, result = tmp_path / "code.py", tmp_path / "benchmarks" / "results" / "one.json"
    result.parent.mkdir(parents=True)
    source.write_text("1")
    result.write_text("{}")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    clean = results.commit()
    assert clean is not None
    assert len(clean) == 12
    result.write_text('{"cases": []}')
    assert results.commit() == clean
    source.write_text("2")
    assert results.commit() == f"{clean}-dirty"


def test_a_case_is_measured_again_with_other_threads_and_its_newest_result_counts(tmp_path: Path) -> None:
    for threads in (1, 2, 2, 1):
        runner = Runner(tmp_path / "result.json", "part", {"threads": threads}, limit=60)
        assert runner.measure(Case({"net": "A"}, lambda threads=threads: {"took": threads})) == {"took": threads}
    assert [case["result"] for case in runner.data["cases"]] == [{"took": 1}, {"took": 2}]
    assert [case["result"] for case in latest(runner.data)] == [{"took": 2}]


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("engine-cpu", engine_table.tables),
        ("engine-cpu-avx2", engine_table.tables),
        ("engine-cpu-avx2-all", engine_table.tables),
        ("reliability", reliability_table.table),
        ("rolling-restart", partial(reliability_table.table, title="Rolling restarts")),
        ("rehearsal", partial(reliability_table.table, title="Rehearsal")),
        ("serving", serving_table.tables),
    ],
)
def test_a_committed_table_is_that_of_its_result_file(name: str, tables: Callable[[Any], str]) -> None:
    data = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert tables(data) == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_the_page_of_the_gpu_benchmark_holds_the_committed_results(tmp_path: Path) -> None:
    page = ROOT / "benchmarks" / "gpu" / "README.md"
    copy = tmp_path / "README.md"
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    gpu_table.write_into(copy, gpu_table.table(RESULTS / "gpu.json"))
    command = "run: python -m benchmarks.gpu.run --table"
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), command


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_a_number_beside_a_link_to_a_result_is_in_that_result(page: Path) -> None:
    """Decimals of a paragraph with such links, and all numbers of the table that it introduces, as rounded there."""
    blocks = page.read_text(encoding="utf-8").split("\n\n")
    for text, following in zip(blocks, [*blocks[1:], ""], strict=True):
        linked = [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#]*/results/[^)#]+)\)", text)]
        if not linked:
            continue
        files = {path.with_suffix(".md") if path.with_suffix(".md").exists() else path for path in linked}
        files |= {path.with_suffix(".json") for path in linked if path.suffix == ".svg"}  # a plot shows all of it
        measured = [float(number) for file in files for number in _NUMBER.findall(file.read_text(encoding="utf-8"))]
        plain = [re.sub(r"\]\([^)]*\)|`[^`]*`", "", each) for each in (text, following)]
        stated = [number for number in _NUMBER.findall(plain[0]) if "." in number]
        if following.startswith("|") and text.endswith(":"):
            stated += _NUMBER.findall(plain[1])
        for number in stated:
            half = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9  # what rounding changes
            assert any(abs(float(number) - each) <= half for each in measured), (number, sorted(files))
