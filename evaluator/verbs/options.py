"""Options shared by several verbs."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prelunet.evaluator.contract import ModelContract
from prelunet.evaluator.datasets.dataset import Sample
from prelunet.evaluator.engine.memory import (
    MemoryEstimate,
    estimate_memory,
    format_bytes,
    parse_memory,
    require_fits,
)
from prelunet.evaluator.engine.session import Device, Placement, Precision, Session
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.decode import MAX_DECODE_BYTES
from prelunet.evaluator.imaging.decode_memory import decode_semaphore
from prelunet.evaluator.machine import machine_memory
from prelunet.evaluator.protocols import (
    Averaging,
    EvaluationProtocol,
    ProtocolOverrides,
    Weighting,
    build_protocol,
    default_protocol_name,
)
from prelunet.evaluator.terminal import report
from prelunet.evaluator.validation.pipeline import decoding_threads

_MODEL_HELP = "Model file written by `prelunet export`."
ModelOption = Annotated[Path, typer.Option("--model", help=_MODEL_HELP)]
OptionalModelOption = Annotated[Path | None, typer.Option("--model", help=_MODEL_HELP)]

ProtocolOption = Annotated[
    str | None,
    typer.Option(
        help="Evaluation protocol: center, ten-crop, multi-scale, spp-18, spp-net, resnet or dense-S (e.g. "
        "dense-256); `prelunet protocols` describes them.",
        show_default="multi-scale; center for an adopted net",
    ),
]
ScalesOption = Annotated[
    str | None, typer.Option(help="Scales (shorter sides in pixels) that replace the protocol's, e.g. 256,384.")
]
FlipOption = Annotated[
    bool | None,
    typer.Option(
        "--flip/--no-flip", help="Add a mirrored copy of every view, or not.", show_default="set by the protocol"
    ),
]
AveragingOption = Annotated[
    Averaging | None,
    typer.Option(help="Average the softmax scores of the windows or their logits.", show_default="softmax"),
]
WeightsOption = Annotated[
    Weighting | None,
    typer.Option(
        help="Give equal weight to each scale or to each window of every view.", show_default="scale; view for spp-18"
    ),
]

DeviceOption = Annotated[
    Device,
    typer.Option(
        help="Device that runs the model: cpu (onnxruntime), openvino (also the CPU, faster), cuda, or auto: CUDA if "
        "available, else cpu."
    ),
]
PrecisionOption = Annotated[
    Precision | None,
    typer.Option(
        help="Precision of the computation: bf16 (openvino), tf32 (cuda), fp32, or fp16 (cuda, for a file exported in "
        "fp16).",
        show_default="the file's if the device supports it, else fp32",
    ),
]
GpusOption = Annotated[
    int, typer.Option(min=0, max=64, help="With cuda: number of GPUs, one session on each; 0 uses all visible GPUs.")
]
ThreadsOption = Annotated[
    int, typer.Option(min=0, max=1024, help="CPU threads that run the model; 0 uses one per core.")
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        help="Limit of this process's main memory, e.g. 4G or 900M; a single very large image may exceed it.",
        show_default="no limit, tuned for speed",
        metavar="SIZE",
    ),
]
GpuMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory-limit",
        help="With cuda: limit of the memory for weights and batches on each GPU, e.g. 6G.",
        show_default="the free memory, tuned for speed",
        metavar="SIZE",
    ),
]


def placement_from_options(
    device: Device, precision: Precision | None, threads: int, memory: str | None, gpu_memory: str | None
) -> Placement:
    """Build the placement from the options. Raises UsageError for a memory size that cannot be parsed."""
    main, gpu = parse_memory(memory), parse_memory(gpu_memory, "--gpu-memory-limit")
    return Placement(device, precision, threads, memory=main, gpu_memory=gpu)


def protocol_from_options(
    name: str | None,
    contract: ModelContract,
    *,
    scales: str | None = None,
    flip: bool | None = None,
    averaging: Averaging | None = None,
    weights: Weighting | None = None,
    exif: bool = False,
) -> EvaluationProtocol:
    """Build the protocol from the options. Raises UsageError if the model does not support it."""
    overrides = ProtocolOverrides(_scales(scales) if scales is not None else None, flip, averaging, weights, exif)
    return build_protocol(name or default_protocol_name(contract), contract, overrides)


def _scales(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", text, re.ASCII):
        raise UsageError(f"--scales {text}: give shorter sides in pixels, separated by commas, e.g. --scales 256,384")
    return tuple(map(int, text.split(",")))


# Estimates of the main memory of a run.


def estimate_run_memory(
    session: Session,
    protocol: EvaluationProtocol,
    chunk: int,
    samples: Sequence[Sample] = (),
    *,
    sessions: int = 1,
    pipelines: int = 1,
) -> MemoryEstimate:
    """Estimate the peak main memory of a run.

    chunk: images per chunk; samples: all images of the dataset; sessions: number of sessions like this one in the
    process; pipelines: number of pipelines that each session serves.
    Raises UsageError if the estimate exceeds `--memory-limit`.
    """
    readers = pipelines * decoding_threads(session.placement.threads)
    workload = {
        "sessions": sessions,
        "pipelines": pipelines,
        "images": len(samples),
        "encoded": readers * max((sample.size for sample in samples), default=0),
    }
    if (limit := session.placement.memory) is None:
        return estimate_memory(session, protocol, chunk, None, **workload)
    return require_fits(session, protocol, chunk, limit, **workload)


def report_memory(need: MemoryEstimate, *, gpu: bool = False) -> None:
    """Print the estimated peak memory, and a warning if the machine has less."""
    decode_capacity = decode_semaphore(gpu=gpu).capacity
    report(f"memory: at most {need}")
    report(
        f"memory: an image that needs more than {format_bytes(decode_capacity)} to decode (docs/performance.md) is "
        f"decoded alone and takes up to {format_bytes(MAX_DECODE_BYTES - decode_capacity)} more"
    )
    if need.total > (available := machine_memory()):
        report(
            f"warning: this machine has only {format_bytes(available)}, too little for images as elongated as the "
            "protocol allows. Give --memory-limit or smaller --scales"
        )
