"""`prelunet validate`: evaluate a model on a dataset."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ..datasets import DatasetSpec, parse_class_selection
from ..engine.load import open_sessions
from ..engine.runtimes import RUNTIMES, Device
from ..engine.session import Placement, Session
from ..errors import UsageError
from ..protocols import ProtocolOverrides, build_protocol, default_protocol_name
from ..reporting.page_data import MAX_HEAT_MAPS
from ..reporting.report import Report, build_report, describe_traits, error_with_interval, scored_over
from ..reporting.statistics import TOPS
from ..terminal import echo, report
from ..validation.evaluate_model import evaluate_model
from ..validation.ray_cluster import Cluster
from ..validation.run import Run, is_run_folder, read_run_info
from .options import GpusOption, ModelOption, Only, ProtocolOption, VerboseOption, derive_options, report_next_command

# What --json prints of the report.
JSON_FIELDS = ("images", "evaluated", "refused", "top1_error", "top1_interval", "top5_error", "top5_interval")

HeatmapsOption = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help=f"Store heat maps of the N most confident mistakes; reports show up to {MAX_HEAT_MAPS}.",
    ),
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Delete the existing run and start over.")]


@derive_options
def validate(
    *,
    model: ModelOption,
    data: DatasetSpec,
    run: Annotated[
        Path,
        typer.Option("--run", "-o", "--output", help="Folder of the run: created, or resumed if it holds this run."),
    ],
    classes: Annotated[
        str | None,
        typer.Option(
            "--only-classes",
            "--classes",
            help="Evaluate only these classes: wnids separated by commas, or a file with one per line.",
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(help="Evaluate only part I of N, e.g. 2/5; `prelunet merge` joins the parts.", metavar="I/N"),
    ] = None,
    protocol: ProtocolOption = None,
    overrides: ProtocolOverrides,
    placement: Annotated[Placement, Only("device", "precision", "threads", "memory", "gpu_memory")],
    gpus: GpusOption = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Evaluate on a Ray cluster: HOST:PORT of its head, `auto` for the cluster of this machine, `local` to "
            "start one here (docs/many-machines.md).",
            metavar="ADDRESS",
            rich_help_panel="Ray cluster",
        ),
    ] = None,
    ray_workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=100_000,
            help="Number of workers; 0 uses as many as fit. Each has a CPU per thread, by default up to 4.",
            rich_help_panel="Ray cluster",
        ),
    ] = 0,
    heatmaps: HeatmapsOption = 0,
    fresh: FreshOption = False,
    verbose: VerboseOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Evaluate a model on a dataset; the same command resumes."""
    if ray_workers and ray is None:
        raise UsageError("--ray-workers sets the number of workers on a Ray cluster; give --ray ADDRESS too")
    if gpus != 1 and ray is not None:
        raise UsageError("--gpus cannot be used with --ray: each worker has its own GPU. Use --ray-workers instead")
    cluster = Cluster(ray, ray_workers, placement.threads) if ray is not None else None
    part = None
    if shard is not None:
        found = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", shard, re.ASCII)
        if found is None or int(found[1]) > int(found[2]):
            raise UsageError(f"--shard {shard}: give I/N with I from 1 to N, e.g. 2/5 for the second of five parts")
        part = int(found[1]), int(found[2])
    sessions = open_for_run(model, run, placement, gpus, fresh=fresh)
    contract = sessions[0].contract
    evaluation_protocol = build_protocol(protocol or default_protocol_name(contract), contract, overrides)
    chosen = parse_class_selection(classes, contract.classes) if classes is not None else ()
    finished = evaluate_model(
        sessions,
        model,
        replace(data, classes=chosen),
        evaluation_protocol,
        run,
        shard=part,
        cluster=cluster,
        heatmaps=heatmaps,
        fresh=fresh,
        report=report,
        verbose=verbose,
    )
    report_result(finished, run, as_json=as_json)
    if finished.info.shard is not None:
        report(f"when every shard of {finished.info.shard[1]} is done: prelunet merge")
    else:
        report_next_command(finished, run)


def open_for_run(model: Path, run: Path, placement: Placement, gpus: int, *, fresh: bool) -> list[Session]:
    """Open a model, with device `auto` on the one that began the run, and report what it runs on."""
    if placement.device == "auto" and not fresh:
        placement = replace(placement, device=_recorded_device(run))
    sessions = open_sessions(model, placement, gpus)
    several = f", on {len(sessions)} GPUs" if len(sessions) > 1 else ""
    report(f"{model.name}: {sessions[0].contract.name} on {sessions[0].circumstances}{several}")
    return sessions


def _recorded_device(folder: Path) -> Device:
    """Return the device of the run in a folder, which `auto` reuses when the run is resumed; `auto` for a new run."""
    devices = {runtime.provider: cast(Device, device) for device, runtime in RUNTIMES.items()}
    return devices.get(read_run_info(folder).circumstances["provider"], "auto") if is_run_folder(folder) else "auto"


def report_result(finished: Run, run: Path, *, as_json: bool = False) -> None:
    """Print the errors, or, for a shard or for images without labels, what was evaluated."""
    images, refused = len(finished.predictions), sum(line.refused is not None for line in finished.predictions)
    if refused:
        report(
            f"warning: {refused:,} of {images:,} images were refused and not evaluated; "
            f"{run / 'predictions.jsonl'} lists them with the reasons"
        )
    numbers: dict[str, Any] = {"images": images, "evaluated": images - refused, "refused": refused}
    if finished.info.shard is not None or not finished.has_labels:
        done = "evaluated" if finished.has_labels else "classified; without labels there are no errors"
        line = f"{images - refused:,} of {images:,} images {done}"
    else:
        result = build_report(finished)
        if result["suspicion"]:
            report(f"warning: {result['suspicion']}")
        if traits := describe_traits(result):
            report(f"images: {traits}")
        numbers = {key: result[key] for key in JSON_FIELDS}
        line = result_line(result)
    echo(json.dumps({"run": str(run), **numbers}) if as_json else line)


def result_line(result: Report) -> str:
    """Return the result in one line: model, protocol, and the errors with their intervals."""
    protocol = result["protocol"]
    over = scored_over(result)
    words = {"mirrored": protocol["mirror"], "logits averaged": protocol["averaging"] == "logit", over: over}
    what = ", ".join([result["model"]["architecture"], protocol["name"], *(word for word in words if words[word])])
    only = result["dataset"]["selection"]
    counts = f"{result['evaluated']:,} of {result['images']:,} images" + (f" (only {only})" if only else "")
    if not result["evaluated"]:
        return f"{what}: no error can be computed, {counts}"
    errors = " ".join(f"top-{k} error {error_with_interval(result, k)}" for k in TOPS)
    return f"{what}: {errors} %, {counts}"
