"""Training images per second and core: our loader compared with a straightforward one, on the same files.

    python -m benchmarks.training.loading --data DIR --output benchmarks/results/loading.json

DIR holds photos; JPEGs are used unchanged, other formats are first saved as JPEGs of quality 95. Without --data the
pictures are synthetic (golden_image of evaluator.contract) in ImageNet's mix of sizes (imagenet_sizes.py).

`plain` is `Image.open(file).convert("RGB")`, a resize of the whole image to a scale from 256 to 512, a random crop of
224, half of them mirrored. `ours` is the training's own path with the same scales, crops and mirroring. Alone: both
take turns on each photo in one process, in a shuffled order; CPU time of the thread counts (time.thread_time), so that
other load matters little. Loaders: worker processes build whole batches, torch's DataLoader with `plain` and
`training_batches` in turn; wall-clock time counts, so that the machine should be idle.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.common.imagenet_sizes import draw
from benchmarks.common.results import header, markdown, shuffled, write_result
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.datasets.open import open_dataset
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.training.data.augmentation import VIEW, random_stream, training_view, view_keys_of_step
from prelunet.training.data.image_cache import TRAINING_LONG_SIDE_CAP, ImageCache
from prelunet.training.data.loader import training_batches
from prelunet.training.recipe import Recipe

QUALITY = 95  # of JPEGs written here, about that of ImageNet's
RECIPE = Recipe(
    architecture="A", crop=224, scales=(256, 512), batch=32, steps=1, rate=0.01, evaluate_every=1, save_every=1
)


def main() -> None:
    """Measure and write the result."""
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "train"
        files = _prepare(options.data, folder / "photos", options.photos)
        (folder / "none").mkdir()  # a training set needs a second class
        Image.new("RGB", (256, 256)).save(folder / "none" / "black.jpg")
        result = {
            **header(__file__, _words(options), ("prelunet", "numpy", "pillow", "torch")),
            "photos": _described(files, options.data),
            "alone": _alone(files, options.repeats),
            "loaders": _loaders(Path(name), options.batches, options.workers) if options.workers else None,
        }
    tables = _tables(result)
    print(tables)
    write_result(options.output, result, tables)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of photos; default: synthetic pictures")
    parser.add_argument(
        "--photos", type=int, default=24, help="maximum number of photos, evenly spaced over the sorted files"
    )
    parser.add_argument("--repeats", type=int, default=20, help="repeats of each photo in the single-process part")
    parser.add_argument("--batches", type=int, default=12, help="batches of 32 per loader in each of 5 turns")
    parser.add_argument("--workers", type=int, default=2, help="processes of each loader; 0 skips the loaders")
    parser.add_argument("--output", type=Path, help="JSON file to write; a table is written beside it")
    return parser.parse_args()


def _words(options: argparse.Namespace) -> list[str]:
    words = ["--data", "DIR"] if options.data else []
    for name in ("photos", "repeats", "batches", "workers"):
        words += [f"--{name}", str(getattr(options, name))]
    return words


def _prepare(data: Path | None, folder: Path, limit: int) -> list[Path]:
    """Write the JPEGs to measure into a folder and return their paths."""
    folder.mkdir(parents=True)
    if data is None:
        for number, (height, width) in enumerate(draw(limit)):
            Image.fromarray(golden_image(height, width)).save(folder / f"{number:03}.jpg", quality=QUALITY)
        return sorted(folder.iterdir())
    found = sorted(
        path for path in data.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png", ".tif", ".tiff"}
    )
    if not found:
        raise SystemExit(f"--data {data}: no photo found")
    for number in range(min(limit, len(found))):
        path = found[number * len(found) // min(limit, len(found))]
        target = folder / f"{number:03}.jpg"
        if path.suffix.lower() in {".jpg", ".jpeg"}:
            target.write_bytes(path.read_bytes())
        else:
            Image.open(path).convert("RGB").save(target, quality=QUALITY)
    return sorted(folder.iterdir())


def _described(files: Sequence[Path], data: Path | None) -> dict[str, Any]:
    sizes = [Image.open(path).size for path in files]
    return {
        "origin": "real photos" if data else "made pictures",
        "count": len(files),
        "kilobytes": round(statistics.mean(path.stat().st_size for path in files) / 1000),
        "sizes": [f"{width}x{height}" for width, height in sizes],
    }


def plain(path: Path, epoch: int, index: int) -> np.ndarray:
    """Build a training view in the straightforward way."""
    image = Image.open(path).convert("RGB")
    random = random_stream(RECIPE.seed, VIEW, epoch, index)
    scale = int(random.integers(*RECIPE.scales, endpoint=True))
    height, width = resized_size(image.height, image.width, scale, TRAINING_LONG_SIDE_CAP)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    top, left = (int(random.integers(0, side - RECIPE.crop, endpoint=True)) for side in (height, width))
    image = image.crop((left, top, left + RECIPE.crop, top + RECIPE.crop))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(image)


def ours(path: Path, epoch: int, index: int) -> np.ndarray:
    """Build a training view as the training does."""
    return np.ascontiguousarray(training_view(decode_image(path.read_bytes()), RECIPE, epoch, index))


WAYS: dict[str, Callable[[Path, int, int], np.ndarray]] = {"plain": plain, "ours": ours}


def _alone(files: Sequence[Path], repeats: int) -> dict[str, Any]:
    """Run both ways in turn on each photo; compare times and pixels."""
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    largest, differing, values = 0, 0, 0
    for index, path in enumerate(files):
        for epoch in range(repeats):
            views = {}
            for name in shuffled(WAYS, epoch * len(files) + index):
                begun = time.thread_time()
                views[name] = WAYS[name](path, epoch, index)
                taken[name].append(1000 * (time.thread_time() - begun))
            off = np.abs(views["ours"].astype(np.int16) - views["plain"])
            largest, differing, values = (
                max(largest, int(off.max())),
                differing + int((off > 0).sum()),
                values + off.size,
            )
    pairs = np.array(taken["plain"]) / np.array(taken["ours"])
    return {
        "views": len(pairs),
        "milliseconds": {name: round(statistics.fmean(values), 3) for name, values in taken.items()},
        "images_per_second_and_core": {name: round(1000 / statistics.fmean(times), 1) for name, times in taken.items()},
        "speedup": round(sum(taken["plain"]) / sum(taken["ours"]), 3),
        "speedup_of_pairs": {
            "median": round(float(np.median(pairs)), 3),
            "quartiles": [round(float(edge), 3) for edge in np.quantile(pairs, [0.25, 0.75])],
        },
        "pixels": {"largest_difference": largest, "share_that_differs": round(differing / values, 6)},
    }


class HandWrittenDataset(Dataset[Any]):
    """The straightforward dataset: one view per item."""

    def __init__(self, image_cache: ImageCache, batches: int) -> None:
        root = image_cache.dataset.location / "train"
        self.items = [
            (root / image_cache.samples[index].file, epoch, index, image_cache.samples[index].label)
            for step in range(batches)
            for epoch, index in view_keys_of_step(RECIPE, step, len(image_cache))
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        path, epoch, index, label = self.items[number]
        return torch.from_numpy(plain(path, epoch, index)), label


def _loaders(root: Path, batches: int, workers: int) -> dict[str, Any]:
    """Let both loaders build the same batches in turn; the first batch, which starts the processes, is not timed."""
    image_cache = ImageCache(open_dataset(root, split="train"), {}, memory=0)
    recipe = replace(RECIPE, steps=batches)

    def by_hand() -> Any:
        return DataLoader(HandWrittenDataset(image_cache, batches), batch_size=RECIPE.batch, num_workers=workers)

    loaders = {"plain": by_hand, "ours": lambda: training_batches(image_cache, recipe, 0, workers=workers)}
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(5):
        for name in shuffled(loaders, turn):
            batches_left = iter(loaders[name]())
            next(batches_left)
            begun = time.perf_counter()
            count = sum(1 for _ in batches_left)
            rates[name].append(count * RECIPE.batch / (time.perf_counter() - begun))
    ratios = [mine / theirs for mine, theirs in zip(rates["ours"], rates["plain"], strict=True)]
    return {
        "workers": workers,
        "batch": RECIPE.batch,
        "images_per_second": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "speedup": round(statistics.median(ratios), 3),
        "speedups": [round(ratio, 3) for ratio in ratios],
    }


def _tables(result: dict[str, Any]) -> str:
    photos, alone, loaders = result["photos"], result["alone"], result["loaders"]
    rows: list[list[Any]] = [
        ["one process, time computed", *alone["images_per_second_and_core"].values(), alone["speedup"]],
    ]
    if loaders:
        rows.append(
            [f"loader, {loaders['workers']} processes", *loaders["images_per_second"].values(), loaders["speedup"]]
        )
    low, high = alone["speedup_of_pairs"]["quartiles"]
    pixels = alone["pixels"]
    return f"""# Loading, compared with a straightforward loader

{result["date"]}, {result["machine"]["cpu"]}, {result["machine"]["cores"]} cores: `{result["command"]}`

{photos["count"]} {photos["origin"]}, {photos["kilobytes"]} kB on average.
Crops of {RECIPE.crop}, scales {RECIPE.scales[0]} to {RECIPE.scales[1]}; images per second (one process: and core)

{markdown(["", "plain", "ours", "ours ÷ plain"], rows)}

One process, view by view: the middle half of the ratios lies between {low} and {high}. Pixels differ by at most
{pixels["largest_difference"]} levels, and {100 * pixels["share_that_differs"]:.2g} % of them differ.
"""


if __name__ == "__main__":
    main()
