"""Options and messages shared by several verbs, and the memory estimate of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prelunet.evaluator.byte_sizes import format_bytes
from prelunet.evaluator.datasets.dataset import Sample
from prelunet.evaluator.engine.memory import MemoryEstimate, estimate_memory, require_fits
from prelunet.evaluator.engine.session import Placement, Session
from prelunet.evaluator.imaging.decode import max_decode_bytes
from prelunet.evaluator.imaging.decode_memory import decode_semaphore
from prelunet.evaluator.machine import machine_memory
from prelunet.evaluator.protocols import EvaluationProtocol, ProtocolOverrides
from prelunet.evaluator.terminal import report
from prelunet.evaluator.validation.pipeline import decoding_threads
from prelunet.evaluator.validation.run import Run

_MODEL_HELP = "Model file written by `prelunet export` or `prelunet adopt`."
ModelOption = Annotated[Path, typer.Option("--model", help=_MODEL_HELP)]
OptionalModelOption = Annotated[Path | None, typer.Option("--model", help=_MODEL_HELP)]

ProtocolOption = Annotated[
    str | None,
    typer.Option(
        help="Evaluation protocol: center, ten-crop, multi-scale, spp-18, spp-net, resnet or dense-S (e.g. "
        "dense-256); `prelunet protocols` describes them.",
        show_default="multi-scale; center for an adopted net",
        rich_help_panel=ProtocolOverrides.HELP_GROUP,
    ),
]
GpusOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=64,
        help="With cuda: number of GPUs, one session on each; 0 uses all visible GPUs.",
        rich_help_panel=Placement.HELP_GROUP,
    ),
]


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
        f"decoded alone and takes up to {format_bytes(max_decode_bytes() - decode_capacity)} more"
    )
    if need.total > (available := machine_memory()):
        report(
            f"warning: this machine has only {format_bytes(available)}, too little for images as elongated as the "
            "protocol allows. Give --memory-limit or smaller --scales"
        )


def report_next_command(run: Run, folder: Path) -> None:
    """Print the command that usually follows a complete run in this folder."""
    if run.has_labels:
        report(f"per-class report: prelunet report {folder}")
    else:
        report(f"for the ILSVRC server: prelunet submission {folder} -o FILE --devkit DIR")
