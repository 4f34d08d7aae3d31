"""`prelunet stats`: the mean of a training set, how its colours vary, and which images cannot be used."""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from prelunet.evaluator.architectures import MAX_SIDE
from prelunet.evaluator.contract import center_scale
from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.datasets.open import open_dataset
from prelunet.evaluator.errors import DatasetError, UsageError
from prelunet.evaluator.terminal import echo
from prelunet.training.data.dataset_statistics import DatasetStatistics, cache_folder, compute_statistics
from prelunet.training.data.splits import open_splits


def stats(
    *,
    data: Annotated[
        Path,
        typer.Option(help="Folder, .tar or .zip with train/ and val/, or of class folders.", metavar="DIR|ARCHIVE"),
    ],
    crop: Annotated[int, typer.Option(min=1, max=MAX_SIDE, help="Side of the central crop in pixels.")] = 224,
    scale: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_SIDE, help="Shorter side before cropping. Default: crop·256/224, as `train` has."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Look at all images anew, whatever is kept.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the mean pixel, image and axes of colour of a training set, and look for unusable images, in val/ too.

    What is found is kept for `train` in PRELUNET_CACHE, else in prelunet in XDG_CACHE_HOME or ~/.cache; the same
    command goes on after an interruption.
    """
    scale = center_scale(crop) if scale is None else scale
    if scale < crop:
        raise UsageError(f"--scale {scale}: a crop of {crop} pixels does not fit; give a scale of {crop} or more")
    train, val = _open(data)
    cache = cache_folder(os.environ)
    look = partial(compute_statistics, scale=scale, crop=crop, cache=cache, fresh=fresh, report=partial(echo, err=True))
    found = look(train, "train/")
    of_val = None if val is None else _images(val, look(val, "val/"))
    if as_json:
        echo(json.dumps({**_as_data(train, found, scale, crop), "val": of_val}, indent=2))
    else:
        echo("\n".join(_lines(train, found, of_val, scale, crop)))


def _open(data: Path) -> tuple[Dataset, Dataset | None]:
    """Open train/ and val/, labelled as `train` does; where it would refuse them, the training set alone."""
    try:
        splits = open_splits(data)
    except DatasetError as error:
        train = open_dataset(data, split="train")
        echo(f"only the images to learn from are looked at: {error}", err=True)
        return train, None
    return splits.train, splits.val


def _images(dataset: Dataset, found: DatasetStatistics) -> dict[str, Any]:
    return {
        "fingerprint": dataset.fingerprint,
        "images": len(dataset.samples),
        "refused": dict(found.refused),
    }


def _as_data(dataset: Dataset, found: DatasetStatistics, scale: int, crop: int) -> dict[str, Any]:
    return {
        "data": str(dataset.location),
        **_images(dataset, found),
        "scale": scale,
        "crop": crop,
        "mean": _numbers(found.mean_channels),
        "deviation": _numbers(_deviation(found)),
        "axes": [_numbers(axis) for axis in found.axes.T],
    }


def _lines(
    dataset: Dataset, found: DatasetStatistics, of_val: dict[str, Any] | None, scale: int, crop: int
) -> list[str]:
    rows = {"mean": found.mean_channels, "deviation": _deviation(found)}
    rows |= {f"axis {number + 1}": axis for number, axis in enumerate(found.axes.T)}
    lowest, highest = found.mean_image.min(), found.mean_image.max()
    return [
        f"{dataset.location}: {len(dataset.samples):,} images, {len(found.refused):,} refused; "
        f"crops of {crop} pixels at the centre, scale {scale}; levels of 0-255",
        *_reasons(found.refused),
        *([] if of_val is None else _lines_of_val(of_val)),
        "",
        f"{'':9}{'red':>9}{'green':>9}{'blue':>9}",
        *(f"{name:9}" + "".join(f"{value:9.2f}" for value in row) for name, row in rows.items()),
        "",
        f"The mean image has values from {lowest:.2f} to {highest:.2f}.",
    ]


def _lines_of_val(of_val: dict[str, Any]) -> list[str]:
    refused = of_val["refused"]
    return [f"val/: {of_val['images']:,} images, {len(refused):,} refused", *_reasons(refused)]


def _reasons(refused: Mapping[str, str]) -> list[str]:
    return [f"  {file}: {reason}" for file, reason in refused.items()]


def _deviation(found: DatasetStatistics) -> Any:
    """Return the standard deviation of each channel: axes times their transpose are the covariance."""
    return np.sqrt((found.axes.astype(np.float64) ** 2).sum(axis=1))


def _numbers(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]
