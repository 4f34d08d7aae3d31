"""`prelunet stats`: the mean of a training set, and how its colours vary."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from evaluator.contract import center_scale
from evaluator.datasets.opening import open_dataset
from evaluator.datasets.sample import Dataset
from evaluator.errors import UsageError
from evaluator.terminal import say
from training.architectures import MAX_SIDE
from training.stats import Survey, cache_folder, surveyed


def stats(
    *,
    data: Annotated[
        Path, typer.Option(help="Folder, .tar or .zip with train/, or of class folders.", metavar="DIR|ARCHIVE")
    ],
    crop: Annotated[int, typer.Option(min=1, max=MAX_SIDE, help="Side of the central crop in pixels.")] = 224,
    scale: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_SIDE, help="Shorter side before cropping. Default: crop·256/224, as `train` has."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Look at all images anew, whatever is kept.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the mean pixel, image and axes of colour of a training set; `train` takes them from where they are kept.

    They are kept in PRELUNET_CACHE, else in prelunet in XDG_CACHE_HOME or ~/.cache; the same command goes on after an
    interruption.
    """
    scale = center_scale(crop) if scale is None else scale
    if scale < crop:
        raise UsageError(f"--scale {scale}: a crop of {crop} pixels does not fit; give a scale of {crop} or more")
    dataset = open_dataset(data, split="train")
    found = surveyed(
        dataset,
        "train/",
        scale=scale,
        crop=crop,
        cache=cache_folder(os.environ),
        fresh=fresh,
        announce=lambda text: say(text, err=True),
    )
    if as_json:
        say(json.dumps(_as_data(dataset, found, scale, crop), indent=2))
    else:
        say("\n".join(_lines(dataset, found, scale, crop)))


def _as_data(dataset: Dataset, found: Survey, scale: int, crop: int) -> dict[str, Any]:
    return {
        "data": str(dataset.location),
        "fingerprint": dataset.fingerprint,
        "images": len(dataset.samples),
        "refused": dict(found.refused),
        "scale": scale,
        "crop": crop,
        "mean": _numbers(found.mean_channels),
        "deviation": _numbers(_deviation(found)),
        "axes": [_numbers(axis) for axis in found.axes.T],
    }


def _lines(dataset: Dataset, found: Survey, scale: int, crop: int) -> list[str]:
    rows = {"mean": found.mean_channels, "deviation": _deviation(found)}
    rows |= {f"axis {number + 1}": axis for number, axis in enumerate(found.axes.T)}
    lowest, highest = found.mean_image.min(), found.mean_image.max()
    return [
        f"{dataset.location}: {len(dataset.samples):,} images, {len(found.refused):,} refused; "
        f"crops of {crop} pixels at the centre, scale {scale}; levels of 0-255",
        *(f"  {file}: {reason}" for file, reason in found.refused.items()),
        "",
        f"{'':9}{'red':>9}{'green':>9}{'blue':>9}",
        *(f"{name:9}" + "".join(f"{value:9.2f}" for value in row) for name, row in rows.items()),
        "",
        f"The mean image has values from {lowest:.2f} to {highest:.2f}.",
    ]


def _deviation(found: Survey) -> Any:
    """Return the standard deviation of each channel: axes times their transpose are the covariance."""
    return np.sqrt((found.axes.astype(np.float64) ** 2).sum(axis=1))


def _numbers(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]
