"""`prelunet stats`: the mean and color axes of a training set, and its unusable images."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ...evaluator.architectures import MAX_SIDE
from ...evaluator.contract import center_scale
from ...evaluator.datasets.dataset import Dataset
from ...evaluator.datasets.open import open_dataset
from ...evaluator.errors import DatasetError, UsageError
from ...evaluator.terminal import echo, report
from ..data.dataset_statistics import DatasetStatistics, compute_statistics
from ..data.splits import open_splits


def stats(
    *,
    data: Annotated[
        Path,
        typer.Option(
            help="Folder, .tar or .zip that contains train/ and val/, or class folders.", metavar="DIR|ARCHIVE"
        ),
    ],
    crop: Annotated[int, typer.Option(min=1, max=MAX_SIDE, help="Side of the central crop, in pixels.")] = 224,
    scale: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_SIDE,
            help="Shorter side before cropping, in pixels.",
            show_default="crop·256/224",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the mean pixel, mean image and color axes of a training set, and list unusable images (also in val/)."""
    scale = center_scale(crop) if scale is None else scale
    if scale < crop:
        raise UsageError(f"--scale {scale}: smaller than the crop of {crop} pixels. Give a scale of {crop} or more")
    try:
        splits = open_splits(data)
        train, val = splits.train, splits.val
    except DatasetError as error:  # `train` would refuse the labels of val/
        train, val = open_dataset(data, split="train"), None
        report(f"only the training images are measured: {error}")
    measure = partial(compute_statistics, scale=scale, crop=crop)
    statistics = measure(train, "train/")
    of_val = None if val is None else _images(val, measure(val, "val/"))
    deviation = np.sqrt((statistics.axes.astype(np.float64) ** 2).sum(axis=1))  # axes · axesᵀ is the covariance
    if not as_json:
        echo("\n".join(_lines(train, statistics, deviation, of_val, scale, crop)))
        return
    result = {
        "data": str(train.location),
        **_images(train, statistics),
        "scale": scale,
        "crop": crop,
        "mean": _numbers(statistics.mean_channels),
        "deviation": _numbers(deviation),
        "axes": [_numbers(axis) for axis in statistics.axes.T],
        "val": of_val,
    }
    echo(json.dumps(result, indent=2))


def _images(dataset: Dataset, statistics: DatasetStatistics) -> dict[str, Any]:
    return {
        "fingerprint": dataset.fingerprint,
        "images": len(dataset.samples),
        "refused": dict(statistics.refused),
    }


def _lines(
    dataset: Dataset,
    statistics: DatasetStatistics,
    deviation: Any,
    of_val: dict[str, Any] | None,
    scale: int,
    crop: int,
) -> list[str]:
    """Return the lines for a terminal. deviation: standard deviation of each channel."""
    rows = {"mean": statistics.mean_channels, "deviation": deviation}
    rows |= {f"axis {number + 1}": axis for number, axis in enumerate(statistics.axes.T)}
    lowest, highest = statistics.mean_image.min(), statistics.mean_image.max()
    lines_of_val = []
    if of_val is not None:
        refused = of_val["refused"]
        lines_of_val = [f"val/: {of_val['images']:,} images, {len(refused):,} refused", *_reasons(refused)]
    return [
        f"{dataset.location}: {len(dataset.samples):,} images, {len(statistics.refused):,} refused; "
        f"central crops of {crop} pixels, scale {scale}; values 0-255",
        *_reasons(statistics.refused),
        *lines_of_val,
        "",
        f"{'':9}{'red':>9}{'green':>9}{'blue':>9}",
        *(f"{name:9}" + "".join(f"{value:9.2f}" for value in row) for name, row in rows.items()),
        "",
        f"The values of the mean image range from {lowest:.2f} to {highest:.2f}.",
    ]


def _reasons(refused: Mapping[str, str]) -> list[str]:
    return [f"  {file}: {reason}" for file, reason in refused.items()]


def _numbers(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]
