"""Part `table`: what the result files of `gpu.py` say, as Markdown for docs/gpu.md, and whether the goals are met.

Of each case the newest result counts. What no file holds is told as "not measured".
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluator.engine.memory import GPU_RATE, GPU_SWITCH_SECONDS
from gpu_results import PARTS, read_results

BEGIN, END = "<!-- results of benchmarks/gpu.py -->", "<!-- end of results -->"
NOT_MEASURED = "not measured"
SHARE, TIMES, MINUTES = 0.60, 1.3, 8.0  # the goals, for model C at multi-scale

Case = dict[str, Any]  # settings and result in one, with the run's circumstances under "run"
Column = tuple[str, Callable[[Case], Any]]


def cases(folder: Path, part: str, path: Path | None = None) -> list[Case]:
    """Return the newest result of each case of a part that did not fail."""
    data = read_results(path or folder / f"gpu-{part}.json")
    newest: dict[str, Case] = {}
    for case in sorted(data["cases"], key=lambda case: case["run"]):
        if "error" not in case["result"]:
            newest[str(case["settings"])] = {**case["result"], **case["settings"], "run": data["runs"][case["run"]]}
    return list(newest.values())


def goals(folder: Path, given: Mapping[str, Path] | None = None) -> list[str]:
    """Return a line for each goal: met, not met or not measured. given: other places of a part's file."""
    given = given or {}
    found = {part: cases(folder, part, given.get(part)) for part in PARTS}
    tiny = any(case["run"]["tiny"] for of_part in found.values() for case in of_part)
    if tiny:
        return ["a rehearsal, by which no goal is judged"]
    return [
        _parity_goal(found["parity"]),
        _share_goal(found["throughput"]),
        *(_times_goal(found["torch"], net) for net in ("C", "A")),
        _minutes_goal(found["throughput"]),
        *_constants(found["sweep"]),
    ]


def _verdict(goal: str, measured: float | None, met: bool, unit: str = "") -> str:
    if measured is None:
        return f"{goal}: {NOT_MEASURED}"
    return f"{goal}: {'met' if met else 'not met'} ({measured:.3g}{unit})"


def _parity_goal(found: Sequence[Case]) -> str:
    passed = sum(bool(case.get("passed")) for case in found)
    goal = "every file within the tolerance of its precision"
    if not found:
        return f"{goal}: {NOT_MEASURED}"
    return f"{goal}: {'met' if passed == len(found) else 'not met'} ({passed} of {len(found)})"


def _chosen(found: Sequence[Case], **wanted: Any) -> list[Case]:
    return [case for case in found if all(case.get(key) == value for key, value in wanted.items())]


def _of_c(found: Sequence[Case], what: str) -> Case | None:
    chosen = _chosen(found, what=what, net="C", precision="fp16", protocol="multi-scale", part=0)
    return chosen[0] if chosen else None


def _share_goal(found: Sequence[Case]) -> str:
    case = _of_c(found, "views")
    share = case and case.get("share_of_peak")
    goal = f"C multi-scale in fp16, without decoding: at least {SHARE:.0%} of the matrix product's rate"
    return _verdict(goal, 100 * share if share else None, bool(share and share >= SHARE), " %")


def _times_goal(found: Sequence[Case], net: str) -> str:
    mixed = [case for case in _chosen(found, what="mixed", net=net) if "images_per_second" in case]
    ours = [case["images_per_second"] for case in mixed if case["competitor"] == "engine"]
    eager = [case["images_per_second"] for case in mixed if case["competitor"].startswith("eager")]
    times = ours[0] / max(eager) if ours and eager else None
    goal = f"{net} on mixed shapes: at least {TIMES} times the best eager torch"
    return _verdict(goal, times, bool(times and times >= TIMES), " times")


def _minutes_goal(found: Sequence[Case]) -> str:
    case = _of_c(found, "jpegs")
    minutes = case and case.get("minutes_for_imagenet")
    goal = f"50,000 images of C multi-scale, decoding included: at most {MINUTES:g} minutes"
    return _verdict(goal, minutes, bool(minutes and minutes <= MINUTES), " minutes, projected")


def _constants(found: Sequence[Case]) -> list[str]:
    """Return what `evaluator.engine.memory` assumes of a GPU, and what was measured with the engine's options."""
    ours = _chosen(found, what="options", net="C", search="HEURISTIC", nhwc=1, fuse_bias=1)
    ours = [case for case in ours if "tflops" in case]
    fp16 = _chosen(ours, precision="fp16")
    switch = f"{fp16[0]['switch_6_ms']:.3g} ms" if fp16 else NOT_MEASURED
    rates = {case["precision"]: f"{case['tflops']:.3g}" for case in ours}
    assumed = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in GPU_RATE.items())
    measured = ", ".join(f"{name} {rates[name]}" for name in GPU_RATE if name in rates) or NOT_MEASURED
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
        *(f"### {title}\n\n{_markdown(found[part], what, columns)}" for title, part, what, columns in _TABLES),
    ]
    return "\n\n".join(parts)


def write_into(document: Path, text: str) -> None:
    """Replace what stands between the two marks of a document. SystemExit where they are not there."""
    whole = document.read_text(encoding="utf-8")
    if whole.count(BEGIN) != 1 or whole.count(END) != 1:
        raise SystemExit(f"{document}: the marks {BEGIN} and {END} should stand there once each")
    before, rest = whole.split(BEGIN)
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def _circumstances(found: Mapping[str, Sequence[Case]]) -> str:
    """Return a line for each machine and set of versions that a result comes from."""
    lines = []
    for part, of_part in found.items():
        for run in {run["date"]: run for run in (case["run"] for case in of_part)}.values():
            versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
            peaks = ", ".join(f"{name} {rate:g}" for name, rate in run.get("matmul_tflops", {}).items())
            package, driver = run["onnxruntime"]["package_name"], run["first"].get("driver_version", "unknown")
            lines.append(
                f"- {part}, {run['date'][:10]}: {run['gpu'] or run['machine']['cpu']}, driver {driver}; {versions} "
                f"({package}); matrix products of 8192 in torch: {peaks} TFLOP/s; `{run['command']}`"
            )
    return "\n".join(lines) or f"Machine, driver and versions: {NOT_MEASURED}."


def _markdown(found: Sequence[Case], what: str, columns: Sequence[Column]) -> str:
    rows = [case for case in found if case["what"] == what]
    if not rows:
        return NOT_MEASURED
    lines = [" | ".join(name for name, _ in columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(_cell(read(case)) for _, read in columns) for case in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "x".join(map(str, value))
    if not isinstance(value, float):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _key(name: str, key: str | None = None) -> Column:
    def read(case: Case) -> Any:
        if (value := case.get(key or name)) is not None:
            return value
        return "out of memory" if case.get("out_of_memory") else "too slow" if case.get("too_slow") else None

    return name, read


def _percent(name: str, key: str) -> Column:
    def read(case: Case) -> str | None:
        value = case.get(key)
        return None if value is None else f"{100 * value:.1f} %"

    return name, read


_NET = (_key("net"), _key("precision"))
_RATES = (_key("images/s", "images_per_second"), _key("TFLOP/s", "tflops"), _percent("of the peak", "share_of_peak"))
_TABLES: tuple[tuple[str, str, str, Sequence[Column]], ...] = (
    (
        "Deviation from the float64 net",
        "parity",
        "parity",
        (
            *_NET,
            _key("canvas"),
            _key("scores, alone", "alone_scores"),
            _key("logits, of the largest", "alone_logits"),
            _key("windows", "alone_windows"),
            _key("scores, together", "together_scores"),
            _key("together from alone", "together_from_alone"),
            _key("within tolerance", "passed"),
        ),
    ),
    (
        "Options of the provider",
        "sweep",
        "options",
        (
            *_NET,
            _key("search"),
            _key("NHWC", "nhwc"),
            _key("fused bias", "fuse_bias"),
            _key("ms", "ms"),
            *_RATES,
            _key("two shapes in turn, ms more", "switch_2_ms"),
            _key("six shapes, ms more", "switch_6_ms"),
        ),
    ),
    (
        "Batches",
        "sweep",
        "batch",
        (
            *_NET,
            _key("height"),
            _key("width"),
            _key("best batch", "best_batch"),
            _key("images/s", "best_images_per_second"),
            _percent("of the peak", "best_share_of_peak"),
        ),
    ),
    (
        "Masks",
        "sweep",
        "masks",
        (*_NET, _key("ragged, ms", "ragged_ms"), _key("exact, ms", "exact_ms"), _percent("masks cost", "masks_cost")),
    ),
    ("Channels of conv1's input", "sweep", "conv1", (*_NET, _key("channels"), _key("ms", "ms"), *_RATES)),
    (
        "Uploads",
        "sweep",
        "upload",
        (
            *_NET,
            _key("MB", "megabytes"),
            _key("pageable, GB/s", "pageable_gb_per_second"),
            _key("pinned by torch, GB/s", "pinned_by_torch_gb_per_second"),
            _key("engine, GB/s", "stage_gb_per_second"),
            _key("in turn, ms", "in_turn_ms"),
            _key("at once, ms", "at_once_ms"),
            _percent("hidden", "hidden"),
        ),
    ),
    (
        "CUDA graphs, one for each canvas (ms of five shapes together)",
        "sweep",
        "graphs",
        (
            *_NET,
            _key("Concat of 63 bins", "concat"),
            _key("plain, repeated", "plain_repeated_ms"),
            _key("plain, in turn", "plain_alternating_ms"),
            _key("graphs, repeated", "graphs_repeated_ms"),
            _key("graphs, in turn", "graphs_alternating_ms"),
            _key("largest deviation of a replay", "largest_deviation"),
        ),
    ),
    *(
        (
            title,
            "throughput",
            what,
            (
                *_NET,
                _key("protocol"),
                _key("images of a part", "images_of_a_part"),
                *_RATES,
                _percent("of the peak, with padding", "computed_share_of_peak"),
                _percent("padding", "padding"),
                _key("changes of shape", "changes_of_shape"),
                _percent("computing", "compute_share"),
                _key("GPU memory, GB", "memory_gb"),
                _key("50,000 images, minutes", "minutes_for_imagenet"),
            ),
        )
        for title, what in (("Whole protocols, without decoding", "views"), ("Whole protocols, from JPEGs", "jpegs"))
    ),
    (
        "Torch beside the engine, one canvas, fp16",
        "torch",
        "canvas",
        (_key("net"), _key("canvas"), _key("competitor"), _key("ms", "ms"), *_RATES, _key("off", "off")),
    ),
    (
        "Torch beside the engine, mixed shapes from the host's memory, fp16",
        "torch",
        "mixed",
        (_key("net"), _key("competitor"), _key("way"), *_RATES, _key("first pass, s", "first_seconds")),
    ),
    (
        "Training steps",
        "training",
        "training",
        (*_NET, _key("channels last", "channels_last"), _key("batch"), _key("ms", "ms"), *_RATES,
         _key("GPU memory, GB", "memory_gb")),
    ),
)  # fmt: skip
