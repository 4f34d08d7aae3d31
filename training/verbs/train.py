"""`prelunet train`: a net from a recipe and a folder of images."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from prelunet.evaluator.architectures import architecture
from prelunet.evaluator.datasets.open import open_dataset
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.terminal import echo
from prelunet.training.data.splits import embedded_dataset_path, median_shorter_side
from prelunet.training.recipe import Recipe, automatic_crop, fit_to_crop, read_recipe, recipe_names
from prelunet.training.verbs.recipe_options import override_keys, with_recipe_options

if TYPE_CHECKING:
    from prelunet.training.distributed.base import ParallelMode
    from prelunet.training.loop.train import TrainingResult


def _train(
    *,
    recipe: Annotated[str, typer.Option(help=f"{', '.join(recipe_names())}, or a file.", metavar="NAME|FILE.toml")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command resumes there.", metavar="RUN")],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder, .tar or .zip with train/ and val/; else the embedded one.", metavar="DIR|ARCHIVE"),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",  # not --start, which torchrun takes for an abbreviation of its own --start-method
            help="Begin with this checkpoint's weights (fine-tuning); fc3 is drawn anew where the classes are others.",
            metavar="CKPT",
        ),
    ] = None,
    crop: Annotated[
        str | None,
        typer.Option(
            help="Side of a training crop in pixels, instead of the recipe's; scales, batch and rate follow, unless "
            "given. auto: 7/8 of the median shorter side of the training images.",
            metavar="N|auto",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; else CUDA where there is any.", metavar="DEVICE")
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="With several processes (torchrun): ddp, or hybrid, the paper's, with the fc layers in one process.",
            metavar="ddp|hybrid",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="How many decode images ahead, in each process; else one a core but one, 16 at most."),
    ] = None,
    diagnose: Annotated[
        bool,
        typer.Option("--diagnose", help="Measure the layers at every evaluation: prelunet inspect RUN shows them."),
    ] = False,
    tensorboard: Annotated[bool, typer.Option(help="Write events for TensorBoard to RUN/tensorboard.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw an earlier run in RUN away.")] = False,
    keys: Mapping[str, Any],
) -> None:
    """Train a net from a recipe; the same command resumes.

    On several GPUs: torchrun --nproc-per-node N --no-python prelunet train ...
    """
    from prelunet.training.data.dataset_statistics import cache_folder
    from prelunet.training.loop.train import train as run_training
    from prelunet.training.loop.trainer import Execution

    if parallel not in {None, "ddp", "hybrid"}:
        raise UsageError(f"--parallel {parallel}: should be ddp or hybrid")
    kind = cast("ParallelMode | None", parallel)
    training = run_training(
        _requested_recipe(recipe, crop, keys, data),
        data,
        out,
        start=start,
        fresh=fresh,
        execution=Execution(device, kind, workers, diagnose, tensorboard, cache_folder(os.environ)),
        report=lambda text: echo(text, err=True),
    )
    if training.is_first:
        # On stderr, so that the errors stay stdout's last line.
        echo(_summary(training), err=True)
        echo(str(training.errors))


train = with_recipe_options(_train, exclude=("crop",))


def _requested_recipe(name: str, crop: str | None, keys: Mapping[str, Any], data: Path | None) -> Recipe:
    """Return the recipe that the options ask for."""
    recipe = read_recipe(name)
    if crop is None:
        return override_keys(recipe, keys)
    stride = architecture(keys.get("architecture", recipe.architecture)).trunk_stride
    fitted = fit_to_crop(recipe, _crop_side(crop, stride, data))
    if "batch" in keys:  # the rate follows a batch that `--crop` has chosen, not one that the user has
        fitted = replace(fitted, rate=recipe.rate)
    return override_keys(fitted, keys)


def _crop_side(text: str, stride: int, data: Path | None) -> int:
    """Return the crop that `--crop` asks for, in pixels; stride: of the net's trunk."""
    if text == "auto":
        images = open_dataset(data or embedded_dataset_path(), split="train")
        return automatic_crop(median_shorter_side(images), stride)
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= 4096:  # int() reads 4300 digits at most
        raise UsageError(f"--crop {text[:40]}: should be a side in pixels, or auto")
    return int(text)


def _summary(training: "TrainingResult") -> str:
    """Return what has come out, and what can be done with the checkpoint now, as commands to type."""
    checkpoint, best = training.checkpoint, training.best
    model, run = checkpoint.with_name("model.onnx"), checkpoint.with_name("multi-scale")
    export = shlex.join(["prelunet", "export", str(checkpoint), "-o", str(model)])
    data = ["--data", str(training.dataset), "--protocol", "multi-scale", "--run", str(run)]
    validate = shlex.join(["prelunet", "validate", "--model", str(model), *data])
    return (
        f"{checkpoint} is trained; the lowest top-1 error on val/ was {best.top1_error:.2f} %, after step {best.step} "
        "(best.safetensors: chosen on val/, so its error there flatters). Go on with:\n"
        f"  {export}\n"
        f"  {validate}\n"
        "errors on val/ with the protocol `center`:"
    )
