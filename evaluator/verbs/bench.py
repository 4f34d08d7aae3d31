"""`prelunet bench`: where an evaluation spends its time, what bounds it, and how fast other engines compute."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..datasets import Dataset, open_images
from ..engine.load import open_sessions
from ..engine.session import Placement, Session
from ..errors import ImageError, Interrupted
from ..files import require_writable, write_atomically
from ..machine import cores
from ..profiling.engines import EngineComparison, compare_engines
from ..profiling.profile import Measurement, benchmark
from ..protocols import EvaluationProtocol, ProtocolOverrides, build_protocol, default_protocol_name
from ..terminal import echo, report, table_lines
from ..validation.evaluate_model import estimate_run_memory
from ..validation.pipeline import prepare
from ..validation.run import build_run_info, describe_dataset
from ..validation.timing import StageTimer
from .options import GpusOption, ModelOption, Only, ProtocolOption, derive_options

ENGINE_SECONDS = 3.0  # of computing in each turn, to compare engines
HEADERS = ("stage", "threads", "seconds", "ms/image", "share of time")


@derive_options
def bench(
    *,
    model: ModelOption,
    data: Annotated[
        Path,
        typer.Option(help="Folder, .tar, .tar.gz, .zip or .parquet of images; no labels needed (docs/datasets.md)."),
    ],
    protocol: ProtocolOption = None,
    overrides: Annotated[ProtocolOverrides, Only("scales", "mirror")],
    placement: Annotated[Placement, Only("device", "precision", "threads", "memory", "gpu_memory")],
    gpus: GpusOption = 1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Measure this many images, evenly spaced, however long they take.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="Without --limit: approximate duration, excluding warm-up.")
    ] = 60.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write the JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what bounds `prelunet validate` with these options, stage by stage, and how fast other engines are."""
    if output is not None:
        require_writable(output)
    sessions = open_sessions(model, placement, gpus)
    session = sessions[0]
    evaluation_protocol = build_protocol(
        protocol or default_protocol_name(session.contract), session.contract, overrides
    )
    report(f"{model.name}: {session.contract.name} on {session.circumstances}")
    dataset = open_images(data, session.contract.classes)
    info = build_run_info(session, model.name, describe_dataset(dataset), evaluation_protocol, memory=placement.memory)
    assert info.batching is not None
    estimate_run_memory(session, evaluation_protocol, info.chunk, dataset, sessions=len(sessions))
    try:
        measured = benchmark(
            sessions, dataset, evaluation_protocol, info.batching.images_together,
            threads=placement.threads, images=limit, seconds=seconds, report=report,
        )  # fmt: skip
        engines = _other_engines(session, model, dataset, evaluation_protocol, measured)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the measurement is incomplete, and nothing was saved") from None
    result = {
        "model": {"file": model.name, "sha256": session.model_sha256, "architecture": session.contract.name},
        "dataset": {"name": dataset.location.name, "images": len(dataset.samples)},
        "protocol": evaluation_protocol.to_json(),
        "circumstances": session.circumstances.to_json(),
        "cores": cores(),
        "threads": placement.threads,
        **measured.to_json(),
        "engines": [engine.to_json() for engine in engines],
    }
    echo(json.dumps(result) if as_json else "\n".join(_lines(measured, evaluation_protocol, engines)))
    if output is not None:
        write_atomically(output, (json.dumps(result, indent=2) + "\n").encode())


def _other_engines(
    session: Session, model: Path, dataset: Dataset, protocol: EvaluationProtocol, measured: Measurement
) -> list[EngineComparison]:
    """Compare the other engines of this CPU on one portion, of as many images as take ENGINE_SECONDS.

    Not under a memory limit, as two sessions exceed it.
    """
    if session.placement.memory is not None:
        return []
    count = min(measured.images_together, max(1, round(ENGINE_SECONDS * measured.images_per_second)))
    samples = [dataset.samples[number * len(dataset.samples) // count] for number in range(count)]
    prepared = [prepare(dataset, sample, protocol, StageTimer()) for sample in samples]
    images = [image.views for image in prepared if not isinstance(image, ImageError)]
    return list(compare_engines(session, model, images, protocol)) if images else []


def _lines(measured: Measurement, protocol: EvaluationProtocol, engines: Sequence[EngineComparison]) -> list[str]:
    """Return the table of stages, the rate, what bounds it, and the other engines."""
    rows: list[Sequence[str]] = [HEADERS]
    for row in measured.stages():
        numbers = f"{row['seconds']:.2f}", f"{row['ms_per_image']:.2f}", f"{row['share']:.1%}"
        rows.append((row["stage"], str(row["threads"]), *numbers))
    refused = f", {measured.refused:,} of them refused" if measured.refused else ""
    return [
        *table_lines(rows, right_aligned=HEADERS[1:]),
        "",
        f"{measured.images:,} images{refused}, {measured.totals.views:,} views, {protocol.name}",
        f"{measured.seconds:.1f} s: {measured.images_per_second:.3g} images/s, padding {measured.totals.padding:.1%}",
        measured.bound(),
        *map(str, engines),
    ]
