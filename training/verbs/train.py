"""`prelunet train`: a net from a recipe and a folder of images."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from evaluator.datasets.opening import open_dataset
from evaluator.errors import UsageError
from evaluator.terminal import say
from training.embedded import embedded_dataset_path
from training.recipe import Recipe, automatic_crop, fit_to_crop, read_recipe, recipe_names
from training.splits import median_shorter_side


def train(
    *,
    recipe: Annotated[str, typer.Option(help=f"{', '.join(recipe_names())}, or a file.", metavar="NAME|FILE.toml")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command resumes there.", metavar="RUN")],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder, .tar or .zip with train/ and val/; else the embedded one.", metavar="DIR|ARCHIVE"),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's number.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the recipe's.")] = None,
    crop: Annotated[
        str | None,
        typer.Option(
            help="Side of a training crop in pixels, instead of the recipe's; scales, batch and rate follow. "
            "auto: 7/8 of the median shorter side of the training images.",
            metavar="N|auto",
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw an earlier run in RUN away.")] = False,
) -> None:
    """Train a net from a recipe; the same command resumes."""
    from training.loop import train as run_training  # here, so that --help needs no torch

    wanted = read_recipe(recipe)
    wanted = replace(wanted, steps=steps or wanted.steps, seed=wanted.seed if seed is None else seed)
    if crop is not None:
        wanted = fit_to_crop(wanted, _crop_side(crop, wanted, data))
        low, high = wanted.scales
        say(f"crop {wanted.crop}, scales {low} to {high}, batch {wanted.batch}, rate {wanted.rate:.4g}", err=True)
    training = run_training(wanted, data, out, fresh=fresh, announce=lambda text: say(text, err=True))
    # On stderr, so that the errors stay stdout's last line.
    say(_next_commands(training.checkpoint, training.dataset), err=True)
    say(str(training.errors))


def _crop_side(text: str, recipe: Recipe, data: Path | None) -> int:
    """Return the crop that `--crop` asks for, in pixels."""
    if text == "auto":
        images = open_dataset(data or embedded_dataset_path(), split="train")
        return automatic_crop(median_shorter_side(images), recipe.net().trunk_stride)
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise UsageError(f"--crop {text}: should be a side in pixels, or auto")
    return int(text)


def _next_commands(checkpoint: Path, dataset: Path) -> str:
    """Return what can be done with the checkpoint now, as commands to type."""
    model = checkpoint.with_name("model.onnx")
    run = checkpoint.with_name("multi-scale")
    return (
        f"{checkpoint} is trained. Go on with:\n"
        f"  prelunet export {checkpoint} -o {model}\n"
        f"  prelunet validate --model {model} --data {dataset} --protocol multi-scale --run {run}\n"
        "errors on val/ with the protocol `center`:"
    )
