"""Small folders of image files to train on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prelunet.evaluator.arrays import Float32Array
from prelunet.training.data.image_cache import ImageCache
from prelunet.training.data.loader import Batch, Loader
from prelunet.training.recipe import Recipe

# demo's trunk at crop 12 has a 3x3 map: the smallest that its pyramid {3, 2, 1} allows
RECIPE = Recipe(
    architecture="demo",
    crop=12,
    scales=(12, 16),
    batch=5,
    steps=12,
    rate=0.003,
    rate_drops=(0.7,),
    evaluate_every=5,
    save_every=3,
    seed=3,
)
SIZES = [(14, 14), (13, 21), (30, 12), (9, 40), (17, 16)]  # height, width; one is wider than 4:1


def write_image(path: Path, seed: int, size: tuple[int, int], tint: int) -> None:
    """Write noise around a color; equal arguments give equal files."""
    noise = np.random.default_rng(seed).integers(0, 80, (*size, 3))
    pixels = noise + np.array([tint, tint // 2, 160 - tint])
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def make_dataset(
    root: Path, *, train: int = 7, val: int = 3, classes: tuple[str, ...] = ("big-cat", "dog", "ox")
) -> Path:
    """Write `root`/{train,val}/class/*.png and return `root`."""
    for place, name in enumerate(classes):
        for split, count in (("train", train), ("val", val)):
            for number in range(count):
                seed = 1000 * place + 100 * (split == "val") + number
                write_image(root / split / name / f"{number:03}.png", seed, SIZES[number % len(SIZES)], 75 * place)
    return root


def write_recipe(path: Path, recipe: Recipe) -> Path:
    """Write a recipe as TOML and return `path`."""
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in recipe.to_json().items()))
    return path


def build_batch(image_cache: ImageCache, recipe: Recipe, step: int, *, axes: Float32Array | None = None) -> Batch:
    """Return the batch of one step, counted from 0."""
    return next(Loader(image_cache, replace(recipe, steps=step + 1), axes=axes, workers=0).training_batches(step))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
