"""Measure the engine on a GPU within ten minutes, the most valuable measurements first.

    python -m benchmarks.gpu.run                        measure all parts
    python -m benchmarks.gpu.run --parts parity server  only these
    python -m benchmarks.gpu.run --plan                 print what each part measures, and about how long it takes
    python -m benchmarks.gpu.run --table                write the results into README.md here
    python -m benchmarks.gpu.run --device cpu --tiny    rehearse in seconds; the file is marked as tiny

Runs from a checkout, without network, with only torch, onnx, onnxruntime-gpu, numpy, Pillow and msgspec; where the
project is not installed, set PYTHONPATH=src. Part `server` needs the project installed with its requirements, and is
left out without them. Each case is written to benchmarks/results/gpu.json (or --output) at once. The same command
resumes an interrupted run and measures nothing twice. With `--device cuda` (the default) nothing silently runs on a
CPU: if the CUDA provider is unavailable, the script prints the reason and exits.

- parity:      deviation of every kind of file from the float64 oracle, alone and on a shared ragged canvas
- throughput:  images/s of whole protocols through the engine, and of torch on the same photos of mixed shapes
- server:      images/s and latency of 16 clients
- training:    images/s of a training step
- fused:       the trunk alone in onnxruntime, eager and compiled torch, and cuDNN graphs that contain PReLU
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.common.results import RESULTS, circumstances, digest_of, read_results
from benchmarks.common.runner import Runner, command_line
from benchmarks.gpu.table import goals, table, write_into

PARTS = ("parity", "throughput", "server", "training", "fused")
# Sources that a result depends on, besides the versions.
MEASURED = (
    "evaluator", "export", "training", "benchmarks/common", "benchmarks/serving",
    *(f"benchmarks/gpu/{name}.py" for name in (*PARTS, "device", "mixed_shapes")),
)  # fmt: skip
LIMIT = 570  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 0, or 1 if a case failed, or 3 if the time limit left some out."""
    begun = time.monotonic()
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, limit=LIMIT)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to measure; default: all")
    parser.add_argument("--plan", action="store_true", help="only print what would be measured")
    parser.add_argument("--table", action="store_true", help="only write the results into README.md here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu needs --tiny")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "prelunet-benchmarks",
                        help="folder that keeps the model files between runs (about 5 GB)")  # fmt: skip
    options = parser.parse_args(words)
    if options.table:
        write_into(Path(__file__).with_name("README.md"), table(options.output or RESULTS / "gpu.json"))
        return 0
    if options.device == "cpu" and not (options.tiny or options.plan):
        parser.error("--device cpu is only for rehearsals: add --tiny, since the real nets would take hours")
    if options.plan:
        for part in options.parts:
            print(f"{part}:", *(f"  {line}" for line in _module_of(part).PLAN), sep="\n")
        return 0
    return _measure(options, words, begun)


def _module_of(part: str) -> ModuleType:
    return import_module(f"benchmarks.gpu.{part}")


def _measure(options: argparse.Namespace, words: Sequence[str], begun: float) -> int:
    from benchmarks.common.rig import Rig
    from benchmarks.gpu.device import check_provider, check_torch, device_circumstances, watch
    from prelunet.evaluator.engine.runtimes.onnx import import_runtime

    runtime = import_runtime()
    name = getattr(runtime, "package_name", "onnxruntime of unknown origin")
    print(f"onnxruntime.package_name {name}, providers {runtime.get_available_providers()}", flush=True)
    rig = Rig(options.device, options.tiny, options.files)
    check_torch(rig.device)
    output = options.output or RESULTS / ("gpu-tiny.json" if options.tiny else "gpu.json")
    read_results(output)  # so that a damaged file is noticed before the first case is measured
    now = device_circumstances(rig, circumstances(__file__, options, (), words), digest_of(*MEASURED))
    print(", ".join(f"{name} {version}" for name, version in now["versions"].items()))
    print(f"{now['gpu'] or now['machine']['cpu']}, {now['first'] or 'no nvidia-smi'}", flush=True)
    check_provider(rig)
    now["matmul_tflops"] = rig.measure_peaks()
    print("matrix products of torch, TFLOP/s: " + ", ".join(f"{name} {rate}" for name, rate in rig.peaks.items()))
    runner = Runner(output, "gpu", now, options.limit, lambda: watch(rig))
    runner.begun = begun  # starting CUDA takes time, too
    for part in options.parts:
        for case in _module_of(part).cases(rig):
            runner.measure(case)
            rig.free()
    return runner.finish(lines=goals(output))


if __name__ == "__main__":
    sys.exit(main())
