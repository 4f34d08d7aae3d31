"""Train a net from start to finish."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...evaluator.architectures import Architecture
from ...evaluator.engine.runtimes.base import is_out_of_memory
from ...evaluator.errors import EnvironmentFault, UsageError
from ...evaluator.json_checks import differences, format_differences
from ...evaluator.validation.evaluate_model import require_outside_images
from ..data.splits import Splits, embedded_dataset_path, open_splits
from ..distributed.base import ParallelMode
from ..distributed.process_group import (
    ProcessGroup,
    device_supports_bf16,
    device_supports_tf32,
    open_process_group,
)
from ..recipe import Recipe
from ..run_state.metrics_log import ErrorRates
from ..run_state.run_folder import LAST_FILE, open_run_folder
from .environment import torch_settings
from .execution import Execution
from .fine_tune import sha256_of_checkpoint
from .trainer import Trainer


@dataclass(frozen=True)
class TrainingResult:
    """The result of a finished run.

    checkpoint: file of the last step; dataset: path of the images; errors, best: last and best evaluation on val/;
    is_first: whether this process reports to the user.
    """

    checkpoint: Path
    dataset: Path
    errors: ErrorRates
    best: ErrorRates
    is_first: bool


def train(
    recipe: Recipe,
    dataset_path: Path | None,
    run_folder: Path,
    *,
    start: Path | None = None,
    fresh: bool = False,
    execution: Execution = Execution(),
    report: Callable[[str], None] = lambda _text: None,
) -> TrainingResult:
    """Train a net from a recipe, or resume an interrupted run. A finished run is left unchanged.

    dataset_path: folder or archive with train/ and val/, None for the embedded dataset; run_folder: see
    training/run_state/run_folder.py; start: initial checkpoint, None for random weights; fresh: delete an earlier run
    in run_folder; report: receives messages to the user.

    Raises DatasetError for unusable data; UsageError for a run folder inside the dataset, or processes started with
    different commands; RunFolderError for a folder that belongs to another run or is in use by another process;
    Interrupted after Ctrl-C or SIGTERM (the state is saved; the message is empty in all processes but the first);
    DivergenceError if a number is no longer finite (the last good state is kept); EnvironmentFault if another process
    of the run has died.
    """
    path = dataset_path or embedded_dataset_path()
    splits = open_splits(path)
    for dataset in (splits.train, splits.val):
        require_outside_images(run_folder, dataset, "--out")
    with torch_settings(recipe.precision, execution), open_process_group(execution.device) as group:
        if recipe.precision == "tf32" and not device_supports_tf32(group.device):
            raise UsageError(
                f"precision tf32 needs a GPU of NVIDIA's Ampere generation or newer, but the training runs on "
                f"{group.device}. Use --precision fp32"
            )
        recipe = replace(recipe, evaluation_scale=recipe.central_scale)
        classes = [entry.to_json() for entry in splits.classes]
        parent = None if start is None else sha256_of_checkpoint(start)
        description = {"recipe": recipe.to_json(), "dataset": splits.to_json(), "classes": classes}
        description |= {} if parent is None else {"start": parent}
        options = {key: getattr(execution, key) for key in ("parallel", "diagnose", "deterministic", "cudnn_benchmark")}
        require_same_command(group, {**description, **options})
        with lock_run_folder(group, run_folder, description, fresh=fresh) as reset_folder:
            own_report = report if group.is_first else (lambda _text: None)
            for message in setup_messages(recipe, splits, group, execution.parallel):
                own_report(message)
            with failures_of_torch(recipe):
                trainer = Trainer(
                    recipe,
                    splits,
                    run_folder,
                    group,
                    execution,
                    start,
                    parent_sha256=parent,
                    reset_folder=reset_folder,
                    report=own_report,
                )
                for message in trainer.status_messages():
                    own_report(message)
                errors, best = trainer.run()
    return TrainingResult(run_folder / LAST_FILE, path, errors, best, group.is_first)


@contextmanager
def failures_of_torch(recipe: Recipe) -> Iterator[None]:
    """Convert what torch raises without enough memory, or without a compiler for `--compile`, to EnvironmentFault."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0][:200]
        if is_out_of_memory(error):
            raise EnvironmentFault(
                f"not enough memory for a step with batch {recipe.batch} ({reason}). Resume with "
                f"--accumulate {2 * recipe.accumulate}, or start over with --precision bf16 or a smaller --batch"
            ) from error
        if recipe.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise EnvironmentFault(
                f"torch.compile failed ({reason}). Omit --compile, or install what it needs (a C++ compiler on a CPU)"
            ) from error
        raise


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


def setup_messages(recipe: Recipe, splits: Splits, group: ProcessGroup, parallel: ParallelMode | None) -> Iterator[str]:
    """Yield the first messages: the device, the values that `--crop` may have chosen, and likely mistakes."""
    if group.size > 1:
        yield f"training on {group.device.type}, {recipe.precision}, {group.size} processes, {parallel or 'ddp'}"
    else:
        unused = "" if parallel is None else f"; one process, so --parallel {parallel} has no effect"
        yield f"training on {group.device}, {recipe.precision}{unused}"
    yield from (f"training images: {remark}" for remark in splits.train.remarks)
    yield from (f"validation images: {remark}" for remark in splits.val.remarks)
    low, high = recipe.scales
    net = recipe.architecture
    replaced = ""
    if isinstance(net, Architecture) and net.crop != recipe.crop:
        replaced = f" (instead of {net.crop}, that of the architecture {net.name})"
    learned = f"batch {recipe.batch}, rate {recipe.rate:.4g}, activation {recipe.activation}"
    yield f"crop {recipe.crop}{replaced}, scales {low} to {high}, {learned}"
    if recipe.precision == "bf16" and not device_supports_bf16(group.device):
        yield f"this {group.device.type} does not support bfloat16: torch emulates it, many times slower than fp32"
