"""Part `table`: the result files of `benchmarks.gpu.run` as Markdown for README.md here, with a verdict on each goal.

The newest result of each case counts. Missing results appear as "not measured".
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import latest, markdown, read_results
from prelunet.evaluator.engine.memory import GPU_FLOPS, GPU_SWITCH_SECONDS

PARTS = ("parity", "sweep", "throughput", "torch", "fused", "training")
BEGIN, END = "<!-- results of benchmarks/gpu/run.py -->", "<!-- end of results -->"
NOT_MEASURED = "not measured"
SHARE, TIMES, MINUTES = 0.60, 1.3, 8.0  # the goals, for model C at multi-scale
# Eager torch on mixed shapes: what the engine is compared with. A run that was too slow to finish counts as measured.
EAGER = {("eager", "pairs"), ("eager", "groups")}
EAGER_OF = {"C": {*EAGER, ("eager-benchmark", "pairs")}, "A": EAGER}

MeasuredCase = dict[str, Any]  # settings and result merged, with the run's circumstances under "run"


def cases(folder: Path, part: str, path: Path | None = None) -> list[MeasuredCase]:
    """Return the newest result of each case of a part, without cases whose newest measurement failed."""
    data = read_results(path or folder / f"gpu-{part}.json")
    found = ({**case["result"], **case["settings"], "run": data["runs"][case["run"]]} for case in latest(data))
    return [case for case in found if "error" not in case]


def goals(folder: Path, files: Mapping[str, Path] | None = None) -> list[str]:
    """Return a line for each goal: met, not met or not measured. files: result files of parts outside `folder`."""
    files = files or {}
    found = {part: cases(folder, part, files.get(part)) for part in PARTS}
    tiny = any(case["run"]["tiny"] for of_part in found.values() for case in of_part)
    if tiny:
        return ["a rehearsal: goals are not judged"]
    parity = found["parity"]
    passed = sum(bool(case.get("passed")) for case in parity)
    verdict = f"{'met' if passed == len(parity) else 'not met'} ({passed} of {len(parity)})" if parity else NOT_MEASURED
    of_c = {"net": "C", "precision": "fp16", "protocol": "multi-scale", "together": 0}
    views, jpegs = (_chosen(found["throughput"], what=what, **of_c) for what in ("views", "jpegs"))
    share = next((100 * case["share_of_peak"] for case in views if case.get("share_of_peak")), None)
    minutes = next((case["minutes_for_imagenet"] for case in jpegs if case.get("minutes_for_imagenet")), None)
    lines = [
        f"every file within the tolerance of its precision: {verdict}",
        _verdict(f"C multi-scale in fp16, without decoding: at least {SHARE:.0%} of the matrix product's rate",
                 share, share is not None and share >= 100 * SHARE, " %"),
    ]  # fmt: skip
    for net in ("C", "A"):
        mixed = {(case["competitor"], case["way"]): case for case in _chosen(found["torch"], what="mixed", net=net)}
        rates = {kind: case["images_per_second"] for kind, case in mixed.items() if "images_per_second" in case}
        ours, eager = rates.get(("engine", "pipeline")), [rate for kind, rate in rates.items() if kind in EAGER_OF[net]]
        times = ours / max(eager) if ours and eager and EAGER_OF[net] <= mixed.keys() else None
        goal = f"{net} on mixed shapes: at least {TIMES} times the best eager torch"
        lines.append(_verdict(goal, times, times is not None and times >= TIMES, " times"))
    goal = f"50,000 images of C multi-scale, decoding included: at most {MINUTES:g} minutes"
    met = minutes is not None and minutes <= MINUTES
    return [*lines, _verdict(goal, minutes, met, " minutes, projected"), *_constants(found["sweep"])]


def _verdict(goal: str, measured: float | None, met: bool, unit: str) -> str:
    if measured is None:
        return f"{goal}: {NOT_MEASURED}"
    return f"{goal}: {'met' if met else 'not met'} ({measured:.3g}{unit})"


def _chosen(found: Sequence[MeasuredCase], **wanted: Any) -> list[MeasuredCase]:
    return [case for case in found if all(case.get(key) == value for key, value in wanted.items())]


def _constants(found: Sequence[MeasuredCase]) -> list[str]:
    """Compare the constants of `evaluator.engine.memory` with the measurements under the engine's options."""
    ours = _chosen(found, what="options", net="C", search="HEURISTIC", nhwc=1)
    ours = [case for case in ours if "tflops" in case and case["fuse_bias"] == (case["precision"] != "fp32")]
    fp16 = _chosen(ours, precision="fp16")
    switch = f"{fp16[0]['switch_6_ms']:.3g} ms" if fp16 else NOT_MEASURED
    rates = {case["precision"]: f"{case['tflops']:.3g}" for case in ours}
    assumed = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in GPU_FLOPS.items())
    measured = ", ".join(f"{name} {rates[name]}" for name in GPU_FLOPS if name in rates) or NOT_MEASURED
    return [
        f"constant: a change of shape costs C {switch}; the planner assumes {1e3 * GPU_SWITCH_SECONDS:g} ms",
        f"constant: C computes {measured} TFLOP/s; the planner assumes {assumed}",
    ]


def table(folder: Path) -> str:
    """Return everything as Markdown."""
    found = {part: cases(folder, part) for part in PARTS}
    parts = [
        "\n".join(f"- {line}" for line in goals(folder)),
        _circumstances(found),
    ]
    for title, part, what, columns in _TABLES:
        # Columns: `title: key` or `key`; a trailing `%` formats a share.
        keys = [column.rpartition(": ")[2] for column in columns]
        titles = [column.rpartition(": ")[0] or key for column, key in zip(columns, keys, strict=True)]
        rows = [[_value(case, key) for key in keys] for case in found[part] if case["what"] == what]
        parts.append(f"### {title}\n\n{markdown(titles, rows) if rows else NOT_MEASURED}")
    return "\n\n".join(parts)


def write_into(document: Path, text: str) -> None:
    """Replace the text between the two marks of a document; raises SystemExit if a mark is missing."""
    whole = document.read_text(encoding="utf-8")
    if whole.count(BEGIN) != 1 or whole.count(END) != 1:
        raise SystemExit(f"{document}: the marks {BEGIN} and {END} must occur exactly once each")
    before, rest = whole.split(BEGIN)
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def _circumstances(found: Mapping[str, Sequence[MeasuredCase]]) -> str:
    """Return a line for each machine and set of versions of the results."""
    lines = []
    for part, of_part in found.items():
        for run in {id(case["run"]): case["run"] for case in of_part}.values():
            versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
            peaks = ", ".join(f"{name} {rate:g}" for name, rate in run.get("matmul_tflops", {}).items())
            package, driver = run["onnxruntime"]["package_name"], run["first"].get("driver_version", "unknown")
            lines.append(
                f"- {part}, {run['date']}: {run['gpu'] or run['machine']['cpu']}, driver {driver}; {versions} "
                f"({package}); matrix products of 8192 in torch: {peaks} TFLOP/s; `{run['command']}`"
            )
    return "\n".join(lines) or f"Machine, driver and versions: {NOT_MEASURED}."


def _value(case: MeasuredCase, key: str) -> Any:
    value = case.get(key.removesuffix("%"))
    if value is None:
        return "out of memory" if case.get("out_of_memory") else "too slow" if case.get("too_slow") else None
    return f"{100 * value:.1f} %" if key.endswith("%") else value


_RATES = ("images/s: images_per_second", "TFLOP/s: tflops", "of the peak: share_of_peak%")
_PROTOCOLS = ("net", "precision", "protocol", "images together: images_together", *_RATES,
              "of the peak, with padding: computed_share_of_peak%", "padding: padding%",
              "changes of shape: changes_of_shape", "computing: compute_share%", "GPU memory, GB: memory_gb",
              "50,000 images, minutes: minutes_for_imagenet")  # fmt: skip
_TABLES = (
    ("Deviation from the float64 net", "parity", "parity",
     ("net", "precision", "canvas", "scores, alone: alone_scores", "logits, of the largest: alone_logits",
      "windows: alone_windows", "scores, together: together_scores", "together from alone: together_from_alone",
      "within tolerance: passed")),
    ("Options of the provider", "sweep", "options",
     ("net", "precision", "search", "NHWC: nhwc", "fused bias: fuse_bias", "ms", *_RATES,
      "two shapes in turn, ms more: switch_2_ms", "six shapes, ms more: switch_6_ms")),
    ("Batches", "sweep", "batch",
     ("net", "precision", "height", "width", "best batch: best_batch", "images/s: best_images_per_second",
      "of the peak: best_share_of_peak%")),
    ("Masks", "sweep", "masks",
     ("net", "precision", "ragged, ms: ragged_ms", "exact, ms: exact_ms", "masks cost: masks_cost%")),
    ("Channels of conv1's input", "sweep", "conv1", ("net", "precision", "channels", "ms", *_RATES, "scores off: off")),
    ("Memory of the GPU by the thread that runs", "sweep", "threads",
     ("net", "precision", "runs", "same thread, GB more: same_gb", "fresh threads, GB more: fresh_gb",
      "same, ms: same_ms", "fresh, ms: fresh_ms")),
    ("Uploads", "sweep", "upload",
     ("net", "precision", "MB: megabytes", "pageable, GB/s: pageable_gb_per_second",
      "pinned by torch, GB/s: pinned_by_torch_gb_per_second", "engine, GB/s: stage_gb_per_second",
      "in turn, ms: in_turn_ms", "at once, ms: at_once_ms", "hidden: hidden%")),
    ("CUDA graphs, one for each canvas (ms of five shapes together)", "sweep", "graphs",
     ("net", "precision", "Concat of 63 bins: concat", "plain, repeated: plain_repeated_ms",
      "plain, in turn: plain_alternating_ms", "graphs, repeated: graphs_repeated_ms",
      "graphs, in turn: graphs_alternating_ms", "largest deviation of a replay: largest_deviation")),
    ("Whole protocols, without decoding", "throughput", "views", _PROTOCOLS),
    ("Whole protocols, from JPEGs", "throughput", "jpegs", _PROTOCOLS),
    ("Torch beside the engine, one canvas, fp16", "torch", "canvas",
     ("net", "canvas", "competitor", "ms", *_RATES, "off")),
    ("Torch beside the engine, mixed shapes from the host's memory, fp16", "torch", "mixed",
     ("net", "competitor", "way", *_RATES, "first pass, s: first_seconds")),
    ("The trunk alone, fp16: a PReLU in the convolution or after it", "fused", "fused",
     ("net", "canvas", "way", "masked", "ms", *_RATES, "off", "not available: not_available")),
    ("Training steps", "training", "training",
     ("net", "precision", "channels last: channels_last", "compiled: compile", "batch", "ms", *_RATES,
      "GPU memory, GB: memory_gb")),
)  # fmt: skip
