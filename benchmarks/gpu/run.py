"""Measure the engine on a GPU, in parts of less than eight minutes each.

    python -m benchmarks.gpu.run --part parity|sweep|throughput|torch|fused|training [--output FILE]
    python -m benchmarks.gpu.run --part table          print the Markdown tables of all results
    python -m benchmarks.gpu.run --part table --output benchmarks/gpu/README.md  write them between its marks
    python -m benchmarks.gpu.run --plan                print what each part measures, and about how long it takes
    python -m benchmarks.gpu.run --part sweep --device cpu --tiny    rehearse in seconds; the file is marked as tiny

Runs from a checkout, without network, with only torch, onnx, onnxruntime-gpu, numpy, Pillow and msgspec; where the
project is not installed, set PYTHONPATH=src. Each case is written to benchmarks/results/gpu-PART.json (or --output) at
once. The same command resumes an interrupted part and measures nothing twice. With `--device cuda` (the default)
nothing silently runs on a CPU: if the CUDA provider is unavailable, the script prints the reason and exits.

- parity:     deviation of every kind of file from the float64 oracle, alone and on a shared ragged canvas
- sweep:      provider options, batch sizes, changes of shape, masks, uploads, CUDA graphs
- throughput: images/s of whole protocols through the engine, with and without decoding, and the time for 50,000 images
- torch:      eager and compiled torch on the same canvases and on mixed shapes, compared with the engine
- fused:      the trunk alone in onnxruntime, eager and compiled torch, and cuDNN graphs that contain PReLU
- training:   images/s of training steps, eager and compiled
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.common.results import RESULTS, circumstances, digest_of, read_results
from benchmarks.common.runner import Runner, command_line
from benchmarks.gpu.table import PARTS, goals, table, write_into

# Sources that a result depends on, besides the versions: these, and the modules of its part.
MEASURED = (
    "evaluator", "export", "training",
    "benchmarks/common/rig.py", "benchmarks/common/nets.py", "benchmarks/gpu/device.py",
)  # fmt: skip
MODULES = {
    "parity": ("gpu/parity",),
    "sweep": ("gpu/sweep", "gpu/graphs", "gpu/uploads"),
    "throughput": ("gpu/throughput", "common/imagenet_sizes", "common/photos"),
    "torch": ("gpu/torch_compared", "common/dense_torch", "gpu/sweep", "gpu/throughput", "common/imagenet_sizes"),
    "fused": ("gpu/fused", "common/dense_torch"),
    "training": ("gpu/training_step",),
}  # the first module of each part measures
WITHOUT_RUNTIME = ("torch", "training")  # they measure torch; the engine is optional
LIMIT = 450  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a part; return 0, or 1 if a case failed, or 3 if the time limit left some out."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, limit=LIMIT)
    parser.add_argument("--part", choices=(*PARTS, "table"), help="part to measure, or table to print the results")
    parser.add_argument("--plan", action="store_true", help="only print what would be measured")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu needs --tiny")
    parser.add_argument("--results", type=Path, default=RESULTS,
                        help="folder of the result files; default of --output: gpu-PART.json there")  # fmt: skip
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "prelunet-benchmarks",
                        help="folder that keeps the model files between parts (about 8 GB)")  # fmt: skip
    options = parser.parse_args(words)
    if options.part is None and not options.plan:
        parser.error("choose a --part, or --plan")
    if options.device == "cpu" and not (options.tiny or options.plan or options.part == "table"):
        parser.error("--device cpu is only for rehearsals: add --tiny, since the real nets would take hours")
    if options.plan:
        from benchmarks.common.rig import Rig

        rig = Rig(options.device, options.tiny, options.files)
        for part in PARTS if options.part in {None, "table"} else (options.part,):
            print(f"{part}:", *(f"  {line}" for line in _module_of(part).plan(rig)), sep="\n")
        return 0
    if options.part == "table":
        if options.output:
            write_into(options.output, table(options.results))
        else:
            print(table(options.results))
        return 0
    return _measure(options, words)


def _module_of(part: str) -> ModuleType:
    return import_module(f"benchmarks.{MODULES[part][0].replace('/', '.')}")


def _measure(options: argparse.Namespace, words: Sequence[str]) -> int:
    from benchmarks.common.rig import Rig
    from benchmarks.gpu.device import check_provider, device_circumstances, watch
    from prelunet.evaluator.engine.runtimes.onnx import import_runtime

    runtime = import_runtime()
    name = getattr(runtime, "package_name", "onnxruntime of unknown origin")
    print(f"onnxruntime.package_name {name}, providers {runtime.get_available_providers()}", flush=True)
    rig = Rig(options.device, options.tiny, options.files)
    _check_torch(rig.device)
    output = options.output or options.results / f"gpu-{options.part}{'-tiny' if options.tiny else ''}.json"
    read_results(output)  # so that a damaged file is noticed before the first case is measured
    sources = (f"benchmarks/{module}.py" for module in MODULES[options.part])
    general = circumstances(__file__, options, (), words)
    now = device_circumstances(rig, general, digest_of(*MEASURED, *sources))
    print(", ".join(f"{name} {version}" for name, version in now["versions"].items()))
    print(f"{now['gpu'] or now['machine']['cpu']}, {now['first'] or 'no nvidia-smi'}", flush=True)
    if options.part not in WITHOUT_RUNTIME:
        check_provider(rig)
    now["matmul_tflops"] = rig.measure_peaks()
    print("matrix products of torch, TFLOP/s: " + ", ".join(f"{name} {rate}" for name, rate in rig.peaks.items()))
    runner = Runner(output, options.part, now, options.limit, lambda: watch(rig))
    _module_of(options.part).run(rig, runner)
    return runner.finish(lines=goals(output.parent, {options.part: output}))


def _check_torch(device: str) -> None:
    import torch

    from prelunet.evaluator.engine.runtimes.onnx import import_runtime

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"--device cuda: unavailable: torch {torch.__version__} finds no GPU. "
            "To rehearse without one: --device cpu --tiny"
        )
    major = str(torch.version.cuda).partition(".")[0]
    theirs = str(getattr(import_runtime(), "cuda_version", "")).partition(".")[0]
    if device == "cuda" and theirs and major != theirs:
        raise SystemExit(
            f"torch is built for CUDA {major} and onnxruntime for CUDA {theirs}: in one process one of them would load "
            "the other's cuDNN. Install both for the same CUDA version"
        )


if __name__ == "__main__":
    sys.exit(main())
