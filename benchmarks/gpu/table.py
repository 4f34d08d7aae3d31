"""The results of `benchmarks.gpu.run` as Markdown for README.md here, with a verdict on each goal.

The newest result of each case counts. Missing results appear as "not measured".
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import latest, markdown, read_results
from prelunet.evaluator.contract import Canvas
from prelunet.evaluator.engine.memory import GPU_FLOPS, GPU_SWITCH_SECONDS
from prelunet.evaluator.engine.runtimes.base import Precision

BEGIN, END = "<!-- results of benchmarks/gpu/run.py -->", "<!-- end of results -->"
NOT_MEASURED = "not measured"
# Net, canvas, precision of part `parity`.
FILES: tuple[tuple[str, Canvas, Precision], ...] = (
    ("A", "ragged", "fp16"), ("A", "ragged", "tf32"), ("A", "ragged", "fp32"), ("A", "exact", "fp16"),
    ("E", "ragged", "fp16"), ("C", "ragged", "fp16"),
)  # fmt: skip
SHARE, TIMES, MINUTES = 0.60, 1.3, 8.0  # the goals, at multi-scale in fp16

MeasuredCase = dict[str, Any]  # settings and result merged, with the run's circumstances under "run"


def _cases(path: Path) -> list[MeasuredCase]:
    """Return the newest result of each case; one whose newest measurement failed has an `error`."""
    data = read_results(path)
    return [{**case["result"], **case["settings"], "run": data["runs"][case["run"]]} for case in latest(data)]


def goals(path: Path) -> list[str]:
    """Return a line for each goal: met, not met or not measured; and for each constant that the planner assumes."""
    found = _cases(path)
    if any(case["run"]["tiny"] for case in found):
        return ["a rehearsal: goals are not judged"]
    parity = [bool(case.get("passed")) for case in _chosen(found, what="parity")]
    complete, right = len(parity) == len(FILES), all(parity)
    verdict = ("met" if complete else NOT_MEASURED) if right else "not met"
    lines = [f"every file within the tolerance of its precision: {verdict} ({sum(parity)} of {len(FILES)})"]
    for net in ("A", "C"):
        share = _one(found, "share_of_peak", what="views", net=net)
        goal = f"{net} in fp16, without decoding: at least {SHARE:.0%} of the matrix product's rate"
        lines.append(_verdict(goal, share and 100 * share, share is not None and share >= SHARE, " %"))
    ours, *eager = (
        _one(found, "images_per_second", what=what, net="A") for what in ("views", "torch pairs", "torch groups")
    )
    times = ours / max(eager) if ours and all(eager) else None
    goal = f"A on mixed shapes: at least {TIMES} times eager torch, the faster way"
    lines.append(_verdict(goal, times, times is not None and times >= TIMES, " times"))
    minutes = _one(found, "minutes_for_imagenet", what="jpegs", net="A")
    goal = f"50,000 images of A, decoding included: at most {MINUTES:g} minutes"
    lines.append(_verdict(goal, minutes, minutes is not None and minutes <= MINUTES, " minutes, projected"))
    switch, tflops = (_one(found, key, what="changes of shape") for key in ("switch_ms", "tflops"))
    return [
        *lines,
        f"constant, ms of a change of shape, A: {_number(switch)} (the planner assumes {1e3 * GPU_SWITCH_SECONDS:g})",
        f"constant, TFLOP/s in fp16, A: {_number(tflops)} (the planner assumes {GPU_FLOPS['fp16'] / 1e12:g})",
    ]


def _verdict(goal: str, measured: float | None, met: bool, unit: str) -> str:
    if measured is None:
        return f"{goal}: {NOT_MEASURED}"
    return f"{goal}: {'met' if met else 'not met'} ({measured:.3g}{unit})"


def _number(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.3g}"


def _chosen(found: Sequence[MeasuredCase], **wanted: Any) -> list[MeasuredCase]:
    return [case for case in found if all(case.get(key) == value for key, value in wanted.items())]


def _one(found: Sequence[MeasuredCase], key: str, **wanted: Any) -> Any:
    return next((case[key] for case in _chosen(found, **wanted) if case.get(key) is not None), None)


def table(path: Path) -> str:
    """Return everything as Markdown."""
    found = _cases(path)
    parts = ["\n".join(f"- {line}" for line in goals(path)), _circumstances(found)]
    for title, kinds, columns in _TABLES:
        # Columns: `title: key` or `key`; a trailing `%` formats a share.
        keys = [column.rpartition(": ")[2] for column in columns]
        titles = [column.rpartition(": ")[0] or key for column, key in zip(columns, keys, strict=True)]
        rows = [[_value(case, key) for key in keys] for case in found if case["what"] in kinds]
        parts.append(f"### {title}\n\n{markdown(titles, rows) if rows else NOT_MEASURED}")
    return "\n\n".join(parts)


def write_into(document: Path, text: str) -> None:
    """Replace the text between the two marks of a document; raises SystemExit if a mark is missing."""
    whole = document.read_text(encoding="utf-8")
    if whole.count(BEGIN) != 1 or whole.count(END) != 1:
        raise SystemExit(f"{document}: the marks {BEGIN} and {END} must occur exactly once each")
    before, rest = whole.split(BEGIN)
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def _circumstances(found: Sequence[MeasuredCase]) -> str:
    """Return a line for each machine and set of versions of the results."""
    lines = []
    for run in {id(case["run"]): case["run"] for case in found}.values():
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
        peaks = ", ".join(f"{name} {rate:g}" for name, rate in run.get("matmul_tflops", {}).items())
        package, driver = run["onnxruntime"]["package_name"], run["first"].get("driver_version", "unknown")
        lines.append(
            f"- {run['date']}: {run['gpu'] or run['machine']['cpu']}, driver {driver}; {versions} "
            f"({package}); matrix products of 8192 in torch: {peaks} TFLOP/s; `{run['command']}`"
        )
    return "\n".join(lines) or f"Machine, driver and versions: {NOT_MEASURED}."


def _value(case: MeasuredCase, key: str) -> Any:
    value = case.get(key.removesuffix("%"))
    if value is None:
        return "out of memory" if case.get("out_of_memory") else "failed" if "error" in case else None
    return f"{100 * value:.1f} %" if key.endswith("%") else value


_RATES = ("images/s: images_per_second", "TFLOP/s: tflops", "of the peak: share_of_peak%")
_TABLES = (
    ("Deviation from the float64 net", ("parity",),
     ("net", "precision", "canvas", "scores, alone: alone_scores", "logits, of the largest: alone_logits",
      "windows: alone_windows", "scores, together: together_scores", "together from alone: together_from_alone",
      "within tolerance: passed")),
    ("Multi-scale, fp16, photos of mixed shapes", ("views", "torch pairs", "torch groups", "jpegs"),
     ("net", "what", *_RATES, "first pass, s: first_seconds", "of the peak, with padding: computed_share_of_peak%",
      "padding: padding%", "changes of shape: changes_of_shape", "computing: compute_share%",
      "GPU memory, GB: memory_gb", "50,000 images, minutes: minutes_for_imagenet")),
    ("A server, fp16", ("server",),
     ("net", "protocol", "clients", "images/s: images_per_second", "p50, ms: p50_ms", "p99, ms: p99_ms", "failed",
      "views a batch: views_per_batch", "padding: padding%", "ready after, s: ready_seconds",
      "GPU memory, GB: memory_gb", "main memory, GB: main_memory_gb", "not available: not_available")),
    ("A training step", ("training",),
     ("net", "precision", "batch", "ms", *_RATES, "GPU memory, GB: memory_gb")),
    ("The trunk alone, fp16: a PReLU in the convolution or after it", ("fused",),
     ("net", "canvas", "way", "masked", "ms", *_RATES, "off", "not available: not_available")),
)  # fmt: skip
