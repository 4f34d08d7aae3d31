"""`prelunet bench`: where the time of an evaluation goes, and what to change."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from evaluator.datasets import Dataset, DatasetPlace, open_place
from evaluator.engine.gpus import open_sessions
from evaluator.engine.memory import MemoryNeed, in_bytes, parse_memory
from evaluator.engine.session import Placement, Session
from evaluator.engine.stages import STAGES
from evaluator.files import write_atomically
from evaluator.protocols import Protocol
from evaluator.terminal import say
from evaluator.validation.benchmark import Measurement, benchmark
from evaluator.validation.bottleneck import Surroundings, advice, in_words, knows_bf16
from evaluator.validation.run import describe_dataset, run_info
from evaluator.verbs.memory import foretold
from evaluator.verbs.options import (
    DeviceOption,
    FlipOption,
    GpusOption,
    MemoryOption,
    PrecisionOption,
    ProtocolOption,
    ScalesOption,
    protocol_asked,
)

HEADERS = ("stage", "threads", "seconds", "ms/image", "share of time")


def bench(
    *,
    model: Annotated[Path, typer.Option(help="Model file, as `prelunet export` wrote it.")],
    data: Annotated[
        Path, typer.Option(help="Folder, .tar, .tar.gz or .zip of images; labels are not needed (docs/datasets.md).")
    ],
    protocol: ProtocolOption = None,
    scales: ScalesOption = None,
    flip: FlipOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = None,
    threads: Annotated[
        int, typer.Option(min=0, max=1024, help="Threads of the model and of decoding; 0 is one per core.")
    ] = 0,
    gpus: GpusOption = 1,
    memory: MemoryOption = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="So many images, spread evenly over all, however long they take.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="Without --limit: about how long to measure, warm-up apart.")
    ] = 60.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the JSON to this file too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure where the time of `prelunet validate` goes with these options, and say what to change."""
    placement = Placement(device, precision, threads, memory=parse_memory(memory))
    sessions = open_sessions(model, placement, gpus)
    session = sessions[0]
    looks = protocol_asked(protocol, session.contract, scales=scales, flip=flip)
    say(f"{model.name}: {session.contract.name} on {session.circumstances}", err=True)
    dataset = open_place(DatasetPlace(data, no_labels=True), session.contract.classes)
    info = run_info(session, model.name, describe_dataset(dataset), looks, memory=placement.memory)
    assert info.batching is not None, "a run that computes says how"
    need = foretold(session, looks, info.chunk)
    measured = benchmark(
        sessions, dataset, looks, info.batching.part,
        threads=threads, images=limit, seconds=seconds, announce=lambda text: say(text, err=True),
    )  # fmt: skip
    told = {**_circumstances(session, model, dataset, looks, threads), **measured.to_json()}
    told |= {"memory_foretold": need and need.total, "bound": in_words(measured)}
    told |= {"advice": advice(measured, _surroundings(session))}
    if output is not None:
        write_atomically(output, (json.dumps(told, indent=2) + "\n").encode())
    say(json.dumps(told) if as_json else "\n".join(_lines(measured, need, told)))


def _surroundings(session: Session) -> Surroundings:
    placement = session.placement
    return Surroundings(
        device=placement.device,
        precision=session.circumstances.precision,
        file_precision=session.contract.precision,
        model_threads=placement.threads,
        cores=os.cpu_count() or 1,
        bf16=knows_bf16(),
        limited=placement.memory is not None,
    )


def _circumstances(session: Session, model: Path, dataset: Dataset, protocol: Protocol, threads: int) -> dict[str, Any]:
    """Return what the numbers are of."""
    return {
        "model": {"file": model.name, "sha256": session.model_sha256, "architecture": session.contract.name},
        "dataset": {"name": dataset.location.name, "images": len(dataset.samples)},
        "protocol": protocol.to_json(),
        "circumstances": session.circumstances.to_json(),
        "cores": os.cpu_count(),
        "threads": threads,
    }


def _lines(measured: Measurement, need: MemoryNeed | None, told: dict[str, Any]) -> list[str]:
    """Return the table and what it means."""
    tally, usual = measured.tally, measured.usual_part
    part = f"in parts of {measured.part}" + (f" (of {usual} in a run)" if measured.part < usual else "")
    refused = f", {measured.refused:,} of them refused" if measured.refused else ""
    speed = "" if measured.gflops is None else f", {measured.gflops:,.0f} GFLOP/s without padding"
    foretold = "" if need is None else f", foretold at most {in_bytes(need.total)}"
    return [
        *_table(measured),
        "",
        f"{measured.images:,} images{refused}, {tally.views:,} views, {told['protocol']['name']}, {part}",
        f"{measured.seconds:.1f} s: {measured.images_per_second:.3g} images/s{speed}",
        f"wall time / compute time {measured.wall_by_compute:.3f}",
        f"padding {tally.padding:.1%}; {tally.batches:,} batches of {measured.canvases:,} canvases, changed "
        f"{tally.changes:,} times",
        f"memory of this process {in_bytes(measured.memory)} at its peak{foretold}",
        "",
        told["bound"],
        *(f"- {text}" for text in told["advice"]),
    ]


def _table(measured: Measurement) -> list[str]:
    """Return the lines of the table of stages; share: of the time of the threads that do it."""
    rows = [HEADERS]
    for stage in STAGES:
        if stage != "write":  # nothing is written
            seconds = measured.tally.seconds[stage]
            numbers = f"{seconds:.2f}", f"{1000 * seconds / measured.images:.2f}", f"{measured.share(stage):.1%}"
            rows.append((stage, str(measured.threads_of(stage)), *numbers))
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADERS))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
