"""Setup of a run: image statistics, initial weights, agreement between processes, start messages."""

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
    """Compute the statistics of all images, and draw the initial weights or load them from a checkpoint.

    start: a checkpoint that provides the initial weights and the mean, or None; cache: see `compute_statistics`;
    report: receives messages to the user.
    Raises DatasetError if too many images cannot be decoded, and what `load_pretrained` raises.
    """
    compute = partial(compute_statistics, scale=recipe.evaluation_scale, crop=recipe.crop, cache=cache, report=report)

    def valid_statistics(dataset: Dataset, split: str) -> DatasetStatistics:
        statistics = compute(dataset, split)
        if is_still_valid(statistics, dataset):
            return statistics
        report(f"{split}: images have changed since their statistics were cached; recomputing")
        return compute(dataset, split, fresh=True)

    of_train, of_val = valid_statistics(splits.train, "train/"), valid_statistics(splits.val, "val/")
    mean = of_train.mean_image if recipe.mean == "image" else of_train.mean_channels
    net, initialization = recipe.build_architecture(), recipe.initialization()
    if start is None:
        tensors = initial_tensors(net, len(splits.classes), recipe.seed, initialization)
    else:
        pretrained = load_pretrained(start, net, splits.classes, recipe.seed, initialization, mean.shape)
        tensors, mean = pretrained.tensors, pretrained.mean
        for remark in pretrained.remarks:
            report(remark)
    return tensors, TrainingProgress(mean, of_train.axes, {"train": of_train.refused, "val": of_val.refused})


# Agreement between the processes of a run


def check_folder_location(folder: Path, dataset: Path) -> None:
    """Raise UsageError for a run folder among the class folders, where it would count as a class."""
    if folder.resolve().parent in {(dataset / split).resolve() for split in ("train", "val")}:
        raise UsageError(
            f"--out {folder}: lies among the class folders of {dataset}, where it would count as a class. Choose a "
            "folder outside the dataset"
        )


def require_same_command(group: ProcessGroup, requested: dict[str, Any]) -> None:
    """Raise UsageError in every process unless all of them were started with the same command. Collective.

    requested: everything that determines the results, as plain data. Otherwise each process might train on its own
    images or at its own rate, and their mean gradient would be meaningless.
    """
    first, *others = group.all_gather(requested)
    for rank, other in enumerate(others, start=1):
        if found := differences(first, other, places=("in process 0", f"in process {rank}")):
            raise UsageError(
                f"the processes of this run were started with different commands:\n{format_differences(found)}\n"
                "Start all of them with the same command, on machines that have the same images"
            )


@contextmanager
def lock_run_folder(
    group: ProcessGroup, folder: Path, description: dict[str, Any], *, fresh: bool
) -> Iterator[Callable[[], None] | None]:
    """Lock the run folder as `open_run_folder` does: the first process locks it, and the others wait until it has."""
    if not group.is_first:
        if group.any(False):
            raise EnvironmentFault(
                "the first process of this run failed before training started; its own message states the cause"
            )
        yield None
        return
    with ExitStack() as stack:
        try:
            reset_folder = stack.enter_context(open_run_folder(folder, description, fresh=fresh))
        except Exception:  # not KeyboardInterrupt: an interrupt should not wait for other processes
            group.any(True)
            raise
        group.any(False)
        yield reset_folder


# Start messages


def setup_messages(recipe: Recipe, splits: Splits, group: ProcessGroup, parallel: ParallelMode | None) -> Iterator[str]:
    """Yield the start messages: the device, the values that `--crop` may have chosen, and likely mistakes."""
    if group.size > 1:
        yield f"training on {group.device.type}, {recipe.precision}, {group.size} processes, {parallel or 'ddp'}"
    else:
        unused = "" if parallel is None else f"; one process, so --parallel {parallel} has no effect"
        yield f"training on {group.device}, {recipe.precision}{unused}"
    low, high = recipe.scales
    yield f"crop {recipe.crop}, scales {low} to {high}, batch {recipe.batch}, rate {recipe.rate:.4g}"
    if recipe.precision == "bf16" and not device_supports_bf16(group.device):
        yield f"this {group.device.type} does not support bfloat16: torch emulates it, many times slower than fp32"
    if splits.train.layout.startswith(SHARDS) and all(wnid.isdecimal() for wnid in splits.train.classes):
        yield (
            f"the shards name the classes {splits.train.classes[0]} to {splits.train.classes[-1]}: "
            "validation images with other class names (such as ImageNet's wnids) will not match this net"
        )
