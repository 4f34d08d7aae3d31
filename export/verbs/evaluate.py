"""`prelunet evaluate`: from a net and a folder of images to the report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ...evaluator.contract import ClassEntry, contract_from_metadata
from ...evaluator.datasets import DatasetSpec, open_from_spec, parse_class_selection
from ...evaluator.engine.runtimes.onnx_metadata import read_metadata
from ...evaluator.engine.session import Placement
from ...evaluator.protocols import ProtocolOverrides, build_protocol, default_protocol_name
from ...evaluator.reporting.report_page import write_report
from ...evaluator.terminal import echo, report
from ...evaluator.validation.evaluate_model import default_run_folder, evaluate_model, require_outside_images
from ...evaluator.verbs.options import GpusOption, Only, ProtocolOption, VerboseOption, derive_options
from ...evaluator.verbs.validate import FreshOption, HeatmapsOption, open_for_run, report_result
from ..adoption import NetOptions, ensure_model_file
from ..foreign.sidecars import ClassList


@derive_options
def evaluate(
    *,
    net: Annotated[
        Path,
        typer.Option(
            "--net",
            help="ONNX classifier, a folder with one and what its makers wrote beside it, or a model file of `prelunet "
            "export` or `prelunet adopt`.",
            metavar="NET.onnx|DIR",
        ),
    ],
    data: Annotated[DatasetSpec, Only("path", "labels", "limit", "restrict_classes", "listed_only")],
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "-o",
            "--output",
            help="Folder of the run: created, or resumed if it holds this run. The adopted net lies beside it.",
            show_default="runs/NET-DATA-PROTOCOL",
        ),
    ] = None,
    own: NetOptions,
    only_classes: Annotated[
        str | None,
        typer.Option(help="Evaluate only these classes: wnids separated by commas, or a file with one per line."),
    ] = None,
    protocol: ProtocolOption = None,
    overrides: ProtocolOverrides,
    placement: Annotated[Placement, Only("device", "precision", "threads", "memory", "gpu_memory")],
    gpus: GpusOption = 1,
    heatmaps: HeatmapsOption = 0,
    fresh: FreshOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Adopt a net if needed, evaluate it on a dataset and write the report; the same command resumes.

    As `prelunet adopt`, `validate` and `report` do. The last line names the report.
    """

    def selected(classes: Sequence[ClassEntry]) -> DatasetSpec:
        chosen = () if only_classes is None else parse_class_selection(only_classes, classes, "--only-classes")
        return replace(data, classes=chosen)

    def check(classes: ClassList) -> None:
        """Refuse a dataset that does not fit before the net is adopted, which may take minutes."""
        require_outside_images(run or Path("runs"), open_from_spec(selected(classes.entries), classes.entries))

    model = ensure_model_file(net, own, Path("runs") if run is None else run.parent, report, check)
    contract = contract_from_metadata(read_metadata(model), str(model))
    evaluation_protocol = build_protocol(protocol or default_protocol_name(contract), contract, overrides)
    data = selected(contract.classes)
    folder = default_run_folder(model, data, evaluation_protocol, overrides) if run is None else run
    sessions = open_for_run(model, folder, placement, gpus, fresh=fresh)
    finished = evaluate_model(
        sessions, model, data, evaluation_protocol, folder,
        heatmaps=heatmaps, fresh=fresh, report=report, verbose=verbose,
    )  # fmt: skip
    report_result(finished, folder)
    written = write_report(folder)
    if written.missing is not None:
        report(f"note: {written.missing}")
    echo(str(written.html or written.json))
