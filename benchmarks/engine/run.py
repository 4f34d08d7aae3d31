"""Compare dense evaluation on the CPU: this project's engine and every other way that we know.

    python -m benchmarks.engine.run --output benchmarks/results/engine-cpu.json

All competitors (competitors.py) have the same weights, pictures and number of threads, and take turns in one process
(interleaved.py). Wrong scores stop the benchmark. For each net, every competitor first runs in its own process (memory,
start time). Then all of one precision take turns, protocol by protocol, then those of the next. The result is written
after each of these steps as JSON and, beside it, as Markdown; a new call starts from scratch. The pictures are
synthetic in photo sizes, or come from --data.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.common.nets import write_files
from benchmarks.common.photos import Photo, load_photos
from benchmarks.common.results import circumstances, digest_of, resident_mb, write_result
from benchmarks.common.runner import command_line
from benchmarks.engine.competitors import (
    BEFORE,
    COMPETITORS,
    REFERENCE,
    BenchmarkNet,
    CompetitorPrecision,
    NotAvailable,
    OpenedCompetitor,
    matrix_product_rates,
)
from benchmarks.engine.int8_files import write_int8_files
from benchmarks.engine.interleaved import PhotoTimings, Reference, StopRule, measure, warm_up
from benchmarks.engine.isolated import run_isolated
from benchmarks.engine.table import goals_of, rows_of, tables
from prelunet.evaluator.architectures import architecture
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.files import sha256_of
from prelunet.evaluator.machine import cores
from prelunet.evaluator.protocols import EvaluationProtocol, build_protocol
from prelunet.evaluator.terminal import progress

Json = dict[str, Any]

MEASURED = (  # code that can change a number
    "evaluator/engine", "evaluator/imaging", "export", "benchmarks/engine/run.py", "benchmarks/engine/competitors.py",
    "benchmarks/common/dense_torch.py", "benchmarks/engine/interleaved.py", "benchmarks/common/nets.py",
    "benchmarks/engine/int8_files.py",
)  # fmt: skip


def main() -> None:
    """Run the competitors on each net, write and print the result."""
    options = _options()
    begun = time.perf_counter()
    photos = load_photos(options.data)
    result: Json = {
        **circumstances(__file__, options, ("prelunet", "onnxruntime", "openvino", "torch", "numpy", "pillow")),
        "source": digest_of(*MEASURED),
        "files": {},
        "threads": options.threads,
        "settings": {},
        "peak_gflop_per_second": matrix_product_rates(options.threads),
        "process_memory_mb": {},
        "results": [],
        "goals": [],
    }
    for name in options.nets:
        with tempfile.TemporaryDirectory(prefix="prelunet-bench-") as folder:
            _log(begun, f"{name}: writing its files")
            write_files(name, Path(folder))
            write_int8_files(Path(folder))
            if options.before is not None:
                _export_with(options.before, Path(folder))
            result["files"][name] = sha256_of(Path(folder) / "ours.onnx")
            _net(options, name, BenchmarkNet(Path(folder), options.threads), photos, result, begun)
        gc.collect()
    _log(begun, "done")
    print(tables(result))


def _options() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--nets", nargs="+", default=["A", "C"], help="architectures")
    parser.add_argument("--protocols", nargs="+", default=["dense-256", "multi-scale"], help="dense protocols")
    parser.add_argument("--data", type=Path, help="folder of photos; default: synthetic pictures")
    parser.add_argument("--images", type=int, nargs=2, default=(3, 9), metavar=("LEAST", "MOST"),
                        help="images per net, protocol and precision")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=40,
                        help="time limit per net, protocol and precision, beyond the LEAST images")  # fmt: skip
    parser.add_argument("--patience", type=float, default=180,
                        help="time limit in seconds for the LEAST images; at least one is always measured")  # fmt: skip
    parser.add_argument("--threads", type=int, default=cores(), help="threads of every competitor")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT",
                        help=f"another checkout, whose export writes the file of '{BEFORE}'")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=list(COMPETITORS), metavar="COMPETITOR", default=list(COMPETITORS),
                        help=f"{REFERENCE} always takes part; also: " + "; ".join(COMPETITORS))  # fmt: skip
    return parser.parse_args()


def _export_with(checkout: Path, folder: Path) -> None:
    """Export the checkpoint with another checkout: `before.onnx`."""
    code = (
        "import sys; from pathlib import Path; from prelunet.export.dense.export import export_checkpoint as export; "
    )
    code += "export(Path(sys.argv[1]), Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, str(folder / "net.safetensors"), str(folder / "before.onnx")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")})


def _net(
    options: argparse.Namespace, name: str, case: BenchmarkNet, photos: Sequence[Photo], result: Json, begun: float
) -> None:
    """Measure all competitors on one net, and write the result after each protocol.

    One precision after the other: all competitors at once would take 20 GB for model C.
    """
    chosen = [one for one in COMPETITORS if one in options.only or one == REFERENCE]
    if options.before is None and BEFORE in chosen:
        chosen.remove(BEFORE)
    protocols = _protocols(case, options.protocols)
    alone = _alone(case, chosen, photos[0], max(scale for protocol in protocols for scale in protocol.scales))
    visits: dict[str, list[PhotoTimings]] = {protocol.name: [] for protocol in protocols}
    reference = Reference(COMPETITORS[REFERENCE].open(case).answer)
    of_net: list[Json] = []
    result["settings"][name], done = {}, list(result["results"])
    for precision in get_args(CompetitorPrecision):
        _log(begun, f"{name}: opening competitors in {precision}")
        opened = _open(case, [one for one in chosen if COMPETITORS[one].precision == precision], alone)
        result["settings"][name] |= {one: dict(competitor.settings) for one, competitor in opened.items()}
        if not opened:
            continue
        warm_up(opened, photos[0], min(protocols, key=lambda protocol: max(protocol.scales)), reference)
        for protocol in protocols:
            _log(begun, f"{name}, {protocol.name}, {precision}: {len(opened)} competitors in turn")
            limits = StopRule(options.images[0], options.images[1], options.seconds, options.patience)
            visits[protocol.name] += measure(opened, photos, protocol, architecture(name), limits, reference)
            of_net = [
                {
                    "net": name,
                    "protocol": one.to_json(),
                    "visits": [visit.to_json() for visit in visits[one.name]],
                    "rows": rows_of(visits[one.name], alone, result["peak_gflop_per_second"]),
                }
                for one in protocols
                if visits[one.name]
            ]
            result["process_memory_mb"][name] = round(resident_mb(peak=True))
            result["results"] = done + of_net
            result["goals"] = goals_of(result["results"], amx="amx_int8" in result["machine"]["instructions"])
            result["minutes"] = round((time.perf_counter() - begun) / 60, 1)
            write_result(options.output, result, tables(result))
        del opened
        case.sessions.clear()
        gc.collect()


def _protocols(case: BenchmarkNet, names: Sequence[str]) -> list[EvaluationProtocol]:
    contract = open_session(case.folder / "ours.onnx", "cpu").contract
    protocols = [build_protocol(name, contract) for name in names]
    for protocol in protocols:
        if protocol.kind != "dense":
            raise SystemExit(
                f"--protocols {protocol.name}: the competitors support only dense protocols: dense-S or multi-scale"
            )
    return protocols


def _alone(case: BenchmarkNet, names: Sequence[str], photo: Photo, scale: int) -> dict[str, Json]:
    """Return memory and start time of each competitor in its own process, by name; see isolated.py."""
    stand_ins = {name: COMPETITORS[name].alone_as or name for name in names}
    height, width = photo.pixels.shape[:2]
    task = {"folder": str(case.folder), "threads": case.threads}
    found: dict[str, Json] = {}
    with progress("isolated", len(set(stand_ins.values())), "competitors") as advance:
        for name in dict.fromkeys(stand_ins.values()):
            try:
                found[name] = run_isolated({**task, "name": name, "height": height, "width": width, "scale": scale})
            except RuntimeError as error:
                raise SystemExit(f"{name}: {error}") from error
            advance(note=name)
    return {name: found[stand_in] for name, stand_in in stand_ins.items()}


def _open(case: BenchmarkNet, names: Sequence[str], alone: Mapping[str, Json]) -> dict[str, OpenedCompetitor]:
    """Open all competitors that were available in their own process."""
    opened: dict[str, OpenedCompetitor] = {}
    with progress("opening", len(names), "competitors") as advance:
        for name in names:
            if "not_available" not in alone[name]:
                try:
                    opened[name] = COMPETITORS[name].open(case)
                except NotAvailable as error:
                    raise SystemExit(f"{name}: available alone, but not beside the others: {error}") from error
            advance(note=f"{name}, {resident_mb():.0f} MB")
    return opened


def _log(begun: float, text: str) -> None:
    print(f"{(time.perf_counter() - begun) / 60:4.1f} min  {text}", flush=True)


if __name__ == "__main__":
    main()
