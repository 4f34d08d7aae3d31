"""Evaluate two models on random portions of a dataset, and merge the portions of each into one run.

Each portion is an ordinary run of each model, so what is done survives a kill, and the same call goes on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..datasets.dataset import Dataset
from ..datasets.selection import IN_RANDOM_ORDER, first_images, part_of, random_order
from ..engine.session import Session
from ..errors import DatasetError
from ..protocols import EvaluationProtocol
from ..terminal import progress
from .run import Run, RunInfo, build_run_info, describe_dataset, is_run_folder, read_run_info
from .stored_runs import log_start, read_rows
from .validate import validate
from .writer import open_run

PORTION = 500  # images


@dataclass(frozen=True)
class ComparedModel:
    """One of two models. name: of its subfolders; model: its file; dataset: with labels for its classes."""

    name: str
    session: Session
    model: Path
    protocol: EvaluationProtocol
    dataset: Dataset

    def run_info(self, dataset: Dataset) -> RunInfo:
        """Describe a run on these images."""
        return build_run_info(self.session, self.model.name, describe_dataset(dataset), self.protocol)


def check_same_images(a: ComparedModel, b: ComparedModel) -> None:
    """Raise DatasetError if two models see different images, labels or classes in a dataset."""
    if (a.dataset.fingerprint, a.dataset.classes) != (b.dataset.fingerprint, b.dataset.classes):
        raise DatasetError(
            f"{a.dataset.location}: its images, labels or classes differ between {a.model.name} and {b.model.name}. "
            "Compare models of the same classes, in the same order"
        )


def evaluate_portions(
    models: Sequence[ComparedModel], folder: Path, seed: int
) -> Iterator[tuple[list[Run], Sequence[str]]]:
    """Evaluate portion after portion on all models; yield the runs of each, and its files in random order.

    seed: of that order. Raises as `validate` does.
    """
    order = random_order(models[0].dataset, seed)
    for number, start in enumerate(range(0, len(order), PORTION), 1):
        chosen, runs = order[start : start + PORTION], []
        for each in models:
            words = f"images {start + 1:,} to {start + len(chosen):,} {IN_RANDOM_ORDER}"
            dataset = part_of(each.dataset, chosen, words)
            where = folder / "portions" / f"{number:04}-{each.name}"
            threads = each.session.placement.threads
            runs.append(validate([each.session], dataset, each.run_info(dataset), where, threads=threads))
        yield runs, [models[0].dataset.samples[index].file for index in chosen]


def merge_portions(
    model: ComparedModel, runs: Sequence[Run], folder: Path, seed: int, report: Callable[[str], None]
) -> None:
    """Write the portions of a model into one run, in order of name, or resume a call that was killed.

    The run replaces one of fewer images, which was enough for a larger margin.
    """
    images = sum(run.info.images for run in runs)
    dataset = first_images(model.dataset, images, seed)
    places = {line.file: (run, row) for run in runs for row, line in enumerate(run.predictions)}
    fresh = is_run_folder(folder) and read_run_info(folder).images != images
    with open_run(folder, model.run_info(dataset), dataset.samples, fresh=fresh) as writer:
        log_start(writer, images, [run.folder for run in runs if run.folder], report, dataset.spec)
        with progress(f"merge {model.name}", images, "images", done=writer.done) as advance:
            while writer.done < images:
                chunk = dataset.samples[writer.done : writer.done + writer.chunk]
                found = [places[sample.file] for sample in chunk]
                rows = np.concatenate([read_rows(run, row, row + 1) for run, row in found])
                writer.append([run.predictions[row] for run, row in found], rows)
                advance(len(chunk))
