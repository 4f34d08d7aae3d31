"""`prelunet train`: train a net from a recipe and a folder of images."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...evaluator.architectures import MAX_SIDE, architecture
from ...evaluator.datasets.open import open_dataset
from ...evaluator.errors import UsageError
from ...evaluator.terminal import echo, report
from ...evaluator.verbs.options import derive_options
from ..data.splits import embedded_dataset_path, median_shorter_side
from ..loop.execution import Execution
from ..net.architecture_file import find_architecture
from ..recipe import Recipe, automatic_crop, changes_for_crop, read_recipe, recipe_names
from .recipe_options import override_keys, with_recipe_options

if TYPE_CHECKING:
    from ..loop.train import TrainingResult


def _train(
    *,
    recipe: Annotated[
        str, typer.Option(help=f"Recipe: {', '.join(recipe_names())}, or a file.", metavar="NAME|FILE.toml")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", "--output", help="Run folder; the same command resumes the run.", metavar="RUN"),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder, .tar or .zip that contains train/ and val/.",
            show_default="the embedded dataset",
            metavar="DIR|ARCHIVE",
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",  # not --start, which torchrun would parse as an abbreviation of its --start-method
            help="Fine-tune: start from this checkpoint's weights. fc3 is reinitialized if the classes differ.",
            metavar="CKPT",
        ),
    ] = None,
    crop: Annotated[
        str | None,
        typer.Option(
            help="Side of a training crop in pixels; overrides the recipe and adapts scales, batch and rate unless "
            "these are given. auto: 7/8 of the median shorter side of the training images.",
            metavar="N|auto",
        ),
    ] = None,
    execution: Execution,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard events to RUN/tensorboard.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier run in RUN and start over.")] = False,
    keys: Mapping[str, Any],
) -> None:
    """Train a net from a recipe; the same command resumes an interrupted run.

    Options named after recipe keys override the recipe; their defaults apply to keys that the recipe omits.

    On several GPUs: torchrun --nproc-per-node N --no-python prelunet train ...
    """
    from ..loop.train import train as run_training

    requested = requested_recipe(recipe, crop, keys, data)
    training = run_training(
        requested,
        data,
        out,
        start=start,
        fresh=fresh,
        execution=replace(execution, events=tensorboard),
        report=report,
    )
    if training.is_first:
        report(_summary(training, requested.evaluation_scale))
        echo(str(training.errors))


train = derive_options(with_recipe_options(_train, exclude=("crop",)))


def requested_recipe(name: str, crop: str | None, keys: Mapping[str, Any], data: Path | None) -> Recipe:
    """Return the recipe with the overrides of the command line."""
    recipe, changes, keys = read_recipe(name), dict[str, Any](), dict(keys)
    net = find_architecture(keys.pop("architecture")) if "architecture" in keys else recipe.architecture
    if crop == "auto":
        stride = architecture(net).trunk_stride
        images = open_dataset(data or embedded_dataset_path(), split="train")
        side = automatic_crop(median_shorter_side(images), stride)
    elif crop is not None:
        if not crop.isdecimal() or len(crop) > 9 or not 1 <= int(crop) <= MAX_SIDE:  # int() parses at most 4300 digits
            raise UsageError(f"--crop {crop[:40]}: should be a side in pixels, 1 to {MAX_SIDE}, or auto")
        side = int(crop)
    if crop is not None:
        changes = changes_for_crop(recipe, side, keep_batch="batch" in keys)
    # At once: a crop may fit only the requested architecture or scales.
    return override_keys(recipe, keys, architecture=net, **changes)


def _summary(training: "TrainingResult", scale: int | None) -> str:
    """Return a summary of the result, with the commands to export and validate the checkpoint.

    scale: at which val/ was evaluated, if it is not that of `center`.
    """
    checkpoint, best = training.checkpoint, training.best
    model, run = checkpoint.with_name("model.onnx"), checkpoint.with_name("multi-scale")
    export = shlex.join(["prelunet", "export", str(checkpoint), "-o", str(model)])
    data = ["--data", str(training.dataset), "--protocol", "multi-scale", "--run", str(run)]
    validate = shlex.join(["prelunet", "validate", "--model", str(model), *data])
    return (
        f"{checkpoint}: trained. The lowest top-1 error on val/ was {best.top1_error:.2f} %, after step {best.step} "
        "(best.safetensors; selected on val/, so its error there is optimistic). Next steps:\n"
        f"  {export}\n"
        f"  {validate}\n"
        f"errors on val/ with the protocol `center{'' if scale is None else f'-{scale}'}`:"
    )
