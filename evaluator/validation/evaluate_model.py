"""Evaluate a model on a dataset, as `prelunet validate` does: open the dataset, report what will be done, validate."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..datasets import DatasetSpec, open_from_spec
from ..datasets.dataset import CLASS_FOLDERS, UNLABELLED, Dataset
from ..datasets.sources.folder import FolderSource, is_visible
from ..engine.heatmap import why_flat
from ..engine.memory import MemoryEstimate, estimate_memory, require_fits
from ..engine.session import Session
from ..errors import UsageError
from ..machine import format_bytes, machine_memory
from ..protocols import EvaluationProtocol, ProtocolOverrides
from .pipeline import decoding_threads
from .ray_cluster import Cluster, evaluate_on_ray
from .run import Run, build_run_info, describe_dataset
from .validate import validate


def evaluate_model(  # noqa: PLR0913 - one argument per option
    sessions: Sequence[Session],
    model: Path,
    data: DatasetSpec,
    protocol: EvaluationProtocol,
    folder: Path,
    *,
    shard: tuple[int, int] | None = None,
    cluster: Cluster | None = None,
    heatmaps: int = 0,
    fresh: bool = False,
    report: Callable[[str], None],
    verbose: bool = False,
) -> Run:
    """Evaluate a model on a dataset, or resume an earlier call with the same arguments, and return the finished run.

    sessions: of the model, which share the work; model: its file; folder: of the run, created if missing;
    shard: number (from 1) and count of the parts, None for the whole dataset; cluster: evaluates instead of the
    sessions; heatmaps: number of mistakes whose heat maps are stored; fresh: start over; report: receives sentences on
    the dataset and where the run starts; verbose: and the estimated memory.
    Raises UsageError if the run needs more than a session's memory limit, and otherwise as `open_from_spec` and
    `validate` do.
    """
    session = sessions[0]
    dataset = open_from_spec(data, session.contract.classes)
    labels = {label for sample in dataset.samples for label in sample.labels}
    require_outside_images(folder, dataset)
    if heatmaps > 0:
        if shard is not None:
            raise UsageError(
                "--heatmaps shows the most confident mistakes of a whole run, and --shard evaluates a part. Merge the "
                "shards, then repeat the command with --run MERGED and without --shard: it computes only the heat maps"
            )
        if labels <= {UNLABELLED}:
            raise UsageError(
                "--heatmaps shows mistakes, and without labels there are none. Leave it out, or give labels"
            )
        if (reason := why_flat(session.contract, protocol)) is not None:
            raise UsageError(f"--heatmaps: {reason}")
    memory, threads = session.placement.memory, session.placement.threads
    info = build_run_info(session, model.name, describe_dataset(dataset), protocol, shard, memory=memory)
    contents = f"{len(dataset.samples):,} images"
    if labels - {UNLABELLED}:
        contents += f" of {len(labels):,} of the model's {len(session.contract.classes):,} classes"
    report(f"{dataset.location}: {contents} ({dataset.layout})")
    for remark in dataset.remarks:
        report(remark)
    if dataset.selection is not None:
        report(f"selection: {dataset.selection}")
    if info.shard is not None and info.images:  # an empty one is refused by `validate`
        first, end = info.span
        report(f"shard {info.shard[0]}/{info.shard[1]}: images {first + 1:,} to {end:,} in order of name")
    need = estimate_run_memory(session, protocol, info.chunk, dataset, sessions=len(sessions))
    report_memory(need, report, verbose=verbose)
    chunk_evaluator = evaluate_on_ray(cluster, session, model, dataset, info, report) if cluster is not None else None
    return validate(
        sessions,
        dataset,
        info,
        folder,
        fresh=fresh,
        threads=threads,
        heatmaps=heatmaps,
        chunk_evaluator=chunk_evaluator,
        report=report,
    )


def name_of(data: Path) -> str:
    """Return the name of a dataset for folders: of a file without its suffix."""
    path = data.resolve()
    return path.name if path.is_dir() else path.stem


def default_run_folder(
    model: Path, data: DatasetSpec, protocol: EvaluationProtocol, overrides: ProtocolOverrides
) -> Path:
    """Return runs/MODEL-DATA-PROTOCOL, at the end the limit and a digest of everything else that was chosen."""
    part = "" if data.limit is None else f"-{data.limit}"
    chosen: tuple[Any, ...] = data.labels, data.classes, data.restrict_classes
    if data.listed_only or overrides != ProtocolOverrides():
        chosen = *chosen, data.listed_only, overrides
    if any(chosen):
        part += f"-{hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]}"
    return Path("runs", f"{model.stem}-{name_of(data.path)}-{protocol.name}{part}")


def require_outside_images(folder: Path, dataset: Dataset, option: str = "--run") -> None:
    """Refuse an output that adds a folder to the class folders: opened again, the dataset would have one class more."""
    if dataset.layout != CLASS_FOLDERS or not isinstance(dataset.reader, FolderSource):
        return
    root = dataset.reader.root
    if not folder.resolve().is_relative_to(root.resolve()):
        return
    first = folder.resolve().relative_to(root.resolve()).parts[:1]
    if first and is_visible(first[0]) and not any(sample.file.startswith(f"{first[0]}/") for sample in dataset.samples):
        raise UsageError(
            f"{option} {folder}: inside {root}, where it would be taken for a class. Choose a folder outside of it"
        )


def estimate_run_memory(
    session: Session,
    protocol: EvaluationProtocol,
    chunk: int,
    dataset: Dataset | None = None,
    *,
    sessions: int = 1,
) -> MemoryEstimate:
    """Estimate the peak main memory of a run.

    chunk: images per chunk; dataset: None to leave out its images; sessions: number of sessions like this one in the
    process.
    Raises UsageError if the estimate exceeds `--memory-limit`.
    """
    workload = {"sessions": sessions}
    if dataset is not None:
        readers = decoding_threads(session.placement.threads)
        workload |= {"images": len(dataset.samples), "encoded": readers * dataset.largest_image}
    if (limit := session.placement.memory) is None:
        return estimate_memory(session, protocol, chunk, None, **workload)
    return require_fits(session, protocol, chunk, limit, **workload)


def report_memory(need: MemoryEstimate, report: Callable[[str], None], *, verbose: bool = False) -> None:
    """Report the estimated peak memory if `verbose`, and a warning if the machine has less."""
    if verbose:
        report(f"memory: at most {need}")
    if need.total > (available := machine_memory()):
        report(
            f"warning: this machine has only {format_bytes(available)}, too little for images as elongated as the "
            "protocol allows. Give --memory-limit or smaller --scales"
        )
