"""Options that several verbs share."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prelunet.evaluator.contract import ModelContract
from prelunet.evaluator.datasets.dataset import Sample
from prelunet.evaluator.engine.memory import (
    MemoryEstimate,
    Runtime,
    Workload,
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
from prelunet.evaluator.terminal import echo
from prelunet.evaluator.validation.pipeline import decoding_threads

_MODEL_HELP = "Model file, as `prelunet export` wrote it."
ModelOption = Annotated[Path, typer.Option("--model", help=_MODEL_HELP)]
OptionalModelOption = Annotated[Path | None, typer.Option("--model", help=_MODEL_HELP)]

ProtocolOption = Annotated[
    str | None,
    typer.Option(
        help="How images are looked at: center, ten-crop, multi-scale, spp-18, spp-net, resnet or dense-S (as "
        "dense-256); `prelunet protocols` tells more. Default: multi-scale, or center for an adopted net."
    ),
]
ScalesOption = Annotated[
    str | None, typer.Option(help="Shorter sides in pixels instead of the protocol's own, as 256,384.")
]
FlipOption = Annotated[
    bool | None,
    typer.Option("--flip/--no-flip", help="Whether every view is seen mirrored too. Default: as the protocol has it."),
]
AveragingOption = Annotated[
    Averaging | None, typer.Option(help="What is averaged: the softmax of the windows (default), or their logits.")
]
WeightsOption = Annotated[
    Weighting | None,
    typer.Option(help="What weighs the same: each scale (default), or each window of every view (default of spp-18)."),
]

DeviceOption = Annotated[
    Device,
    typer.Option(
        help="Where the model runs: cpu (onnxruntime), openvino (the CPU too, faster), cuda, or auto: CUDA where it "
        "comes up, else cpu."
    ),
]
PrecisionOption = Annotated[
    Precision | None,
    typer.Option(
        help="What is computed in: bf16 (openvino), tf32 (cuda) or fp32, or fp16 (cuda) for a file exported in it. "
        "Default: the file's own where the device has it, else fp32."
    ),
]
GpusOption = Annotated[
    int, typer.Option(min=0, max=64, help="With cuda: on how many GPUs, a session on each; 0 is all that are visible.")
]
ThreadsOption = Annotated[int, typer.Option(min=0, max=1024, help="Threads of the model on a CPU; 0 is one per core.")]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        help="Most main memory that this process takes, one very large image apart, as 4G or 900M. Default: what is "
        "fastest.",
        metavar="SIZE",
    ),
]
GpuMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory-limit",
        help="With cuda: most memory of weights and batches on each GPU, as 6G. Default: what is fastest and free.",
        metavar="SIZE",
    ),
]


def placement_from_options(
    device: Device, precision: Precision | None, threads: int, memory: str | None, gpu_memory: str | None
) -> Placement:
    """Build the placement that the options ask for; UsageError for an amount of memory that is none."""
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
    """Build the protocol that the options ask for; UsageError when the model cannot do it."""
    overrides = ProtocolOverrides(_scales(scales) if scales is not None else None, flip, averaging, weights, exif)
    return build_protocol(name or default_protocol_name(contract), contract, overrides)


def _scales(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", text, re.ASCII):
        raise UsageError(f"--scales {text}: give shorter sides in pixels with commas between, as --scales 256,384")
    return tuple(map(int, text.split(",")))


# What verbs say of the main memory that a run takes.


def estimate_run_memory(
    session: Session,
    protocol: EvaluationProtocol,
    chunk: int,
    samples: Sequence[Sample] = (),
    *,
    sessions: int = 1,
    pipelines: int = 1,
) -> MemoryEstimate:
    """Return what a run takes of the main memory at most, in chunks of so many images.

    samples: all that the dataset lists; sessions: like this one in the process; pipelines: that each of them serves.
    Raises UsageError when that is more than `--memory-limit`.
    """
    contract, placement = session.contract, session.placement
    on_gpu = session.circumstances.on_gpu
    runtime: Runtime = "cuda" if on_gpu else "openvino" if placement.device == "openvino" else "cpu"
    readers = pipelines * decoding_threads(placement.threads)
    workload = Workload(
        runtime,
        session.circumstances.precision,
        session.model_bytes,
        session.rules if on_gpu else None,
        sessions=sessions,
        pipelines=pipelines,
        images=len(samples),
        encoded=readers * max((sample.size for sample in samples), default=0),
    )
    if placement.memory is None:
        return estimate_memory(contract, protocol, chunk, None, workload)
    return require_fits(contract, protocol, chunk, placement.memory, workload)


def report_memory(need: MemoryEstimate, *, gpu: bool = False) -> None:
    """Say what is needed at most, with a warning where the machine has less."""
    decode_capacity = decode_semaphore(gpu=gpu).capacity
    echo(f"memory: at most {need}", err=True)
    echo(
        f"memory: an image that alone takes more than {format_bytes(decode_capacity)} to decode (docs/performance.md) is decoded by "
        f"itself and takes up to {format_bytes(MAX_DECODE_BYTES - decode_capacity)} more",
        err=True,
    )
    if need.total > (there := machine_memory()):
        echo(
            f"warning: this machine has {format_bytes(there)}. If images are as elongated as the protocol lets them be, "
            "that is too little: give --memory-limit, or smaller --scales",
            err=True,
        )
