"""Evaluate two models on random portions of a dataset, and merge the portions of each into one run.

Each portion is an ordinary run of each model, so what is done survives a kill, and the same call goes on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..datasets.dataset import Dataset, Sample
from ..engine.session import Session
from ..errors import DatasetError
from ..protocols import EvaluationProtocol
from ..terminal import progress
from .run import Run, build_run_info, describe_dataset, is_run_folder, read_run, read_run_info
from .stored_runs import log_start, read_rows
from .validate import validate
from .writer import open_run

PORTION = 500  # images


@dataclass(frozen=True)
class Contestant:
    """A model that is compared. name: of its subfolders; model: its file; dataset: with labels for its classes."""

    name: str
    session: Session
    model: Path
    protocol: EvaluationProtocol
    dataset: Dataset


def check_same_images(a: Contestant, b: Contestant) -> None:
    """Raise DatasetError if two models see different images or labels in a dataset."""
    one, other = ([(sample.file, sample.labels) for sample in each.dataset.samples] for each in (a, b))
    if one != other:
        raise DatasetError(
            f"{a.dataset.location}: its images or labels differ between {a.model.name} and {b.model.name}. Compare "
            "models of the same classes, in the same order"
        )


def evaluate_portions(
    contestants: Sequence[Contestant], folder: Path, order: Sequence[int]
) -> Iterator[tuple[list[Run], Sequence[str]]]:
    """Evaluate portion after portion on all models; yield the runs of each, and its files in random order.

    order: the numbers of the images in random order. Raises as `validate` does.
    """
    for number, start in enumerate(range(0, len(order), PORTION), 1):
        chosen, runs = order[start : start + PORTION], []
        for each in contestants:
            words = f"images {start + 1:,} to {start + len(chosen):,} in random order"
            dataset = _part(each.dataset, chosen, words)
            info = build_run_info(each.session, each.model.name, describe_dataset(dataset), each.protocol)
            where = folder / "portions" / f"{number:04}-{each.name}"
            runs.append(validate([each.session], dataset, info, where, threads=each.session.placement.threads))
        yield runs, [contestants[0].dataset.samples[index].file for index in chosen]


def merge_portions(
    contestant: Contestant, runs: Sequence[Run], folder: Path, order: Sequence[int], report: Callable[[str], None]
) -> Run:
    """Write the portions of a model into one run, in order of name, or resume a call that was killed.

    order: the numbers of all images in random order; the portions are its beginning.
    """
    total = len(contestant.dataset.samples)
    images = sum(run.info.images for run in runs)
    words = f"the first {images:,} of {total:,} images in random order"
    dataset = contestant.dataset if images == total else _part(contestant.dataset, order[:images], words)
    places = {line.file: (run, row) for run in runs for row, line in enumerate(run.predictions)}
    info = build_run_info(contestant.session, contestant.model.name, describe_dataset(dataset), contestant.protocol)
    fresh = is_run_folder(folder) and read_run_info(folder).images != images  # of a larger margin
    with open_run(folder, info, dataset.samples, fresh=fresh) as writer:
        log_start(writer, images, [run.folder for run in runs if run.folder], report)
        with progress(f"merge {contestant.name}", images, "images", done=writer.done) as advance:
            while writer.done < images:
                chunk = dataset.samples[writer.done : writer.done + info.chunk]
                found = [places[sample.file] for sample in chunk]
                rows = np.concatenate([read_rows(run, row, row + 1) for run, row in found])
                writer.append([run.predictions[row] for run, row in found], rows)
                advance(len(chunk))
    return read_run(folder)


def _part(dataset: Dataset, chosen: Sequence[int], words: str) -> Dataset:
    """Return some images of a dataset, in order of name. words: what they are, for run.json."""
    samples: list[Sample] = [dataset.samples[index] for index in sorted(chosen)]
    selection = words if dataset.selection is None else f"{dataset.selection}, of these {words}"
    return replace(dataset, samples=samples, selection=selection)
