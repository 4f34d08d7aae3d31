"""What a run begins with: what is known of its images, and its first weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from prelunet.evaluator.arrays import Float32Array
from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.datasets.layouts import SHARDS
from prelunet.evaluator.errors import EnvironmentFault, UsageError
from prelunet.evaluator.json_checks import differences, format_differences
from prelunet.training.data.dataset_statistics import DatasetStatistics, compute_statistics, is_still_valid
from prelunet.training.data.splits import Splits
from prelunet.training.distributed.base import ParallelMode
from prelunet.training.distributed.process_group import ProcessGroup, device_supports_bf16
from prelunet.training.loop.fine_tune import load_pretrained
from prelunet.training.net.initialization import initial_tensors
from prelunet.training.recipe import Recipe
from prelunet.training.run_state.resume_state import TrainingProgress
from prelunet.training.run_state.run_folder import open_run_folder


def initial_state(
    recipe: Recipe, splits: Splits, start: Path | None, cache: Path | None, report: Callable[[str], None]
) -> tuple[Mapping[str, Float32Array], TrainingProgress]:
    """Look at all images once, and draw the initial weights or take those to begin with.

    start: a checkpoint whose weights and mean are the first ones; cache: see `training.data.dataset_statistics.survey`;
    report: receives what a user should know. Raises DatasetError where too many images cannot be decoded, and as
    `load_pretrained`.
    """
    look = partial(compute_statistics, scale=recipe.evaluation_scale, crop=recipe.crop, cache=cache, report=report)

    def surveyed(dataset: Dataset, what: str) -> DatasetStatistics:
        found = look(dataset, what)
        if is_still_valid(found, dataset):
            return found
        report(f"{what}: images have changed since they were looked at, so all are looked at anew")
        return look(dataset, what, fresh=True)

    of_train, of_val = surveyed(splits.train, "train/"), surveyed(splits.val, "val/")
    mean = of_train.mean_image if recipe.mean == "image" else of_train.mean_channels
    net, how = recipe.build_architecture(), recipe.initialization()
    if start is None:
        tensors = initial_tensors(net, len(splits.classes), recipe.seed, how)
    else:
        begun = load_pretrained(start, net, splits.classes, recipe.seed, how, mean.shape)
        tensors, mean = begun.tensors, begun.mean
        for remark in begun.remarks:
            report(remark)
    return tensors, TrainingProgress(mean, of_train.axes, {"train": of_train.refused, "val": of_val.refused})


# What the processes of a training do together before it begins: agree on what is asked for, and hold its folder.


def check_folder_location(folder: Path, dataset: Path) -> None:
    """Raise UsageError for a run's folder among the class folders, where it would be taken for a class."""
    if folder.resolve().parent in {(dataset / split).resolve() for split in ("train", "val")}:
        raise UsageError(
            f"--out {folder}: among the class folders of {dataset} it would be taken for a class. Choose a folder "
            "outside the images"
        )


def require_same_command(group: ProcessGroup, requested: dict[str, Any]) -> None:
    """Raise UsageError in every process when not all of them were asked for the same. Collective.

    wanted: plain data, all that decides the results. Else each would train on its own images or at its own rate, and
    the mean of their gradients would be that of no training.
    """
    first, *others = group.all_gather(requested)
    for rank, other in enumerate(others, start=1):
        if found := differences(first, other, places=("in process 0", f"in process {rank}")):
            raise UsageError(
                f"the processes of this training were asked for different things:\n{format_differences(found)}\n"
                "Start all of them with the same command, on machines that have the same images"
            )


@contextmanager
def lock_run_folder(
    group: ProcessGroup, folder: Path, description: dict[str, Any], *, fresh: bool
) -> Iterator[Callable[[], None] | None]:
    """Hold the run's folder, as `open_run_folder`: the first process does, and the others come when it has."""
    if not group.is_first:
        if group.any(False):
            raise EnvironmentFault("the first process of this training ended before the training began; it says why")
        yield None
        return
    with ExitStack() as stack:
        try:
            reset_folder = stack.enter_context(open_run_folder(folder, description, fresh=fresh))
        except Exception:  # not KeyboardInterrupt: whoever stops the program does not wait for other processes
            group.any(True)
            raise
        group.any(False)
        yield reset_folder


# What a user is told before a training begins.


def setup_messages(recipe: Recipe, splits: Splits, group: ProcessGroup, parallel: ParallelMode | None) -> Iterator[str]:
    """Yield on what the training runs, what `--crop` may have chosen, and what is seldom meant."""
    if group.size > 1:
        yield f"training on {group.device.type}, {recipe.precision}, {group.size} processes, {parallel or 'ddp'}"
    else:
        alone = "" if parallel is None else f"; one process, so --parallel {parallel} changes nothing"
        yield f"training on {group.device}, {recipe.precision}{alone}"
    low, high = recipe.scales
    yield f"crop {recipe.crop}, scales {low} to {high}, batch {recipe.batch}, rate {recipe.rate:.4g}"
    if recipe.precision == "bf16" and not device_supports_bf16(group.device):
        yield f"this {group.device.type} has no bfloat16: torch imitates it, which takes many times as long as fp32"
    if splits.train.layout.startswith(SHARDS) and all(wnid.isdecimal() for wnid in splits.train.classes):
        yield (
            f"the classes are called {splits.train.classes[0]} to {splits.train.classes[-1]}, as in the shards: "
            "validation images whose classes have other names (ImageNet's wnids) will not fit this net"
        )
