"""Part `throughput`: images per second of whole protocols through the engine, on pictures of ImageNet's sizes.

`views`: a chunk of 1,024 images, resized already, through `run_views` in the parts that `validate` makes of it: planning,
packing, upload, compute, results. `jpegs`: the same through `validate` itself, with JPEG files in memory, 16 threads
that decode and resize, averages, and the run folder written. The sizes are those of `imagenet_sizes.draw`.

Useful operations are those of the views' own pixels, padding not counted, so that the share of the peak is what the user
gets; `computed_share_of_peak` is what the GPU does.
"""

import io
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from evaluator.datasets.sample import Dataset, Sample
from evaluator.engine.batching import Plan
from evaluator.engine.classify import combine, plan_views, run_views
from evaluator.engine.session import Outputs, Session
from evaluator.imaging.resize import resized_size
from evaluator.imaging.views import ViewImage
from evaluator.protocols import Protocol, make_protocol
from evaluator.validation.run import describe_dataset, run_info
from evaluator.validation.validate import validate
from gpu_results import Results
from gpu_rig import Rig
from imagenet_sizes import draw

IMAGES = 1024  # a chunk on a GPU
IMAGENET = 50_000
THREADS = 16
QUALITY = 95  # of the JPEGs; most of ImageNet's are about 100 kB
PICTURES = 256  # different JPEGs, repeated
REPEATS = 3
SECONDS = 12  # after which no repeat is begun

# Net, precision, protocol (for a crop of 224), images.
VIEWS = (
    ("C", "fp16", "multi-scale", IMAGES),
    ("A", "fp16", "multi-scale", IMAGES),
    ("B", "fp16", "multi-scale", IMAGES),
    ("C", "fp16", "dense-256", IMAGES),
    ("C", "fp16", "dense-384", IMAGES),
    ("A", "fp16", "dense-256", IMAGES),
    ("A", "fp16", "dense-384", IMAGES),
    ("B", "fp16", "dense-256", IMAGES),
    ("B", "fp16", "dense-384", IMAGES),
    ("C", "tf32", "multi-scale", IMAGES // 2),
    ("C", "fp32", "multi-scale", IMAGES // 4),
)
JPEGS = (
    ("C", "fp16", "multi-scale", 2 * IMAGES),  # two chunks, so that one is decoded while another is computed
    ("A", "fp16", "dense-256", 4 * IMAGES),
    ("A", "fp16", "multi-scale", 2 * IMAGES),
)

Settings = dict[str, Any]


def plan(rig: Rig) -> list[str]:
    """Return what would be measured, a line each."""
    return [
        f"{len(VIEWS)} times net x protocol x precision on views in memory, {rig.few(IMAGES, 8)} images each: A, B, C; "
        "dense-256, dense-384, multi-scale; fp16, and C multi-scale in tf32 and fp32",
        f"{len(JPEGS)} times `validate` on JPEGs in memory, with {THREADS} threads",
        "about 6 minutes",
    ]


def run(rig: Rig, results: Results) -> None:
    """Measure all cases; the one that the goals are about first, with decoding and without."""
    for what, (net, precision, protocol, images) in _order():
        if precision not in rig.precisions:
            continue
        settings = {"what": what, "net": net, "precision": precision, "protocol": protocol}
        settings["images"] = rig.few(images, 8)
        work = partial(_views if what == "views" else _jpegs, rig, settings)
        results.measure(settings, work, 60 if net == "C" or what == "jpegs" else 35)


def _order() -> Iterator[tuple[str, tuple[str, str, str, int]]]:
    yield "views", VIEWS[0]
    yield from (("jpegs", case) for case in JPEGS)
    yield from (("views", case) for case in VIEWS[1:])


def _protocol(rig: Rig, session: Session, name: str) -> Protocol:
    if name.startswith("dense-"):
        name = f"dense-{rig.px(int(name.removeprefix('dense-')))}"
    return make_protocol(name, session.contract)


class Watched:
    """A session that notes how long it stages and computes; everything else is the session's."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.seconds = {"stage": 0.0, "compute": 0.0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def stage(self, images: np.ndarray, sizes: np.ndarray) -> Any:
        """Stage, on the clock."""
        return self._on_the_clock("stage", partial(self._session.stage, images, sizes))

    def compute(self, staged: Any) -> Outputs:
        """Compute, on the clock."""
        found: Outputs = self._on_the_clock("compute", partial(self._session.compute, staged))
        return found

    def run(self, images: np.ndarray, sizes: np.ndarray) -> Outputs:
        """Stage and compute."""
        return self.compute(self.stage(images, sizes))

    def _on_the_clock(self, what: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds[what] += time.perf_counter() - begun


def _views(rig: Rig, settings: Settings) -> dict[str, Any]:
    """Run a chunk of views, several times; the first time is told apart, since its shapes are new."""
    before = rig.used_memory_gb()
    session = rig.session(settings["net"], settings["precision"])
    protocol = _protocol(rig, session, settings["protocol"])
    sizes = draw(settings["images"])
    info = run_info(session, "model.onnx", describe_dataset(_dataset(sizes, [b"none"])), protocol)
    assert info.batching is not None
    part, per_image = info.batching.part, len(protocol.views)
    views = list(_resized_noise(sizes, protocol))
    plans = [plan_views(session, views[start : start + part * per_image]) for start in _starts(views, part * per_image)]
    watched = Watched(session)
    took = []
    while len(took) < rig.few(1 + REPEATS) and (len(took) < 2 or sum(took) < SECONDS):
        watched.seconds = dict.fromkeys(watched.seconds, 0.0)
        begun = time.perf_counter()
        for start in _starts(views, part * per_image):
            found = run_views(watched, views[start : start + part * per_image])
            for first in range(0, len(found), per_image):
                combine(protocol, found[first : first + per_image])
        took.append(time.perf_counter() - begun)
    seconds = float(np.median(took[1:]))
    return {
        **_rates(rig, settings, protocol, sizes, seconds),
        "first_seconds": took[0],
        "stage_seconds": watched.seconds["stage"],
        "compute_seconds": watched.seconds["compute"],
        "memory_gb": None if before is None else rig.used_memory_gb() - before,
        **_planned(rig, settings, plans, seconds),
        "part": part,
        "batching": info.batching.to_json(),
        "provider": session.circumstances.provider,
    }


def _starts(views: Sequence[ViewImage], step: int) -> range:
    return range(0, len(views), step)


def _resized_noise(sizes: Sequence[tuple[int, int]], protocol: Protocol) -> Iterator[ViewImage]:
    """Yield the views of images of these sizes, each another place of one large picture of noise."""
    shapes = [resized_size(*size, scale, protocol.long_side_cap) for size in sizes for scale in protocol.scales]
    rng = np.random.default_rng(0)
    most = [max(shape[axis] for shape in shapes) for axis in (0, 1)]
    noise = rng.integers(0, 256, (most[0] + 1024, most[1] + 1024, 3), np.uint8)
    for height, width in sizes:
        top, left = (int(place) for place in rng.integers(0, 1024, 2))
        for view in protocol.views:
            h, w = resized_size(height, width, view.scale, protocol.long_side_cap)
            pixels = noise[top : top + h, left : left + w]
            yield ViewImage(view, pixels[:, ::-1] if view.mirrored else pixels, capped=False)


def _planned(rig: Rig, settings: Settings, plans: Sequence[Plan], seconds: float) -> dict[str, Any]:
    """Tell of the batches: padding, changes of shape, and what the GPU computes in all."""
    batches = [batch for plan in plans for batch in plan.batches]
    canvases = [(batch.height, batch.width) for batch in batches for _ in range(batch.rows)]
    tflops = rig.flop(settings["net"], canvases) / seconds / 1e12
    pixels = sum(plan.canvas_pixels for plan in plans)
    return {
        "padding": 1 - sum(plan.images_pixels for plan in plans) / pixels,
        "batches": len(batches),
        "changes_of_shape": sum(plan.canvases for plan in plans),
        "different_canvases": len({(batch.rows, batch.height, batch.width) for batch in batches}),
        "rows_per_batch": len(canvases) / len(batches),
        "computed_tflops": tflops,
        "computed_share_of_peak": rig.share_of_peak(tflops, settings["precision"]),
    }


def _rates(
    rig: Rig, settings: Settings, protocol: Protocol, sizes: Sequence[tuple[int, int]], seconds: float
) -> dict[str, Any]:
    """Tell images per second, the share of the peak, and the time for ImageNet's validation images."""
    shapes = [resized_size(*size, view.scale, protocol.long_side_cap) for size in sizes for view in protocol.views]
    tflops = rig.flop(settings["net"], shapes) / seconds / 1e12
    return {
        "images_per_second": len(sizes) / seconds,
        "seconds": seconds,
        "tflop_per_image": rig.flop(settings["net"], shapes) / len(sizes) / 1e12,
        "tflops": tflops,
        "share_of_peak": rig.share_of_peak(tflops, settings["precision"]),
        "minutes_for_imagenet": IMAGENET * seconds / len(sizes) / 60,
    }


class InMemory:
    """JPEG files by name: the number of the image."""

    def __init__(self, files: Sequence[bytes]) -> None:
        self.files = files

    def read(self, file: str) -> bytes:
        """Return the bytes of an image."""
        return self.files[int(file) % len(self.files)]


def _dataset(sizes: Sequence[tuple[int, int]], files: Sequence[bytes]) -> Dataset:
    samples = [Sample(f"{index:06}", 0, len(files[index % len(files)])) for index in range(len(sizes))]
    return Dataset(Path("imagenet-sizes"), ("n00000000",), samples, InMemory(files))


def _jpegs(rig: Rig, settings: Settings) -> dict[str, Any]:
    """Validate JPEGs in memory, a few images first so that nothing is new."""
    session = rig.session(settings["net"], settings["precision"])
    protocol = _protocol(rig, session, settings["protocol"])
    sizes = draw(rig.few(PICTURES, 8))
    with ThreadPoolExecutor(THREADS) as pool:
        files = list(pool.map(_jpeg, sizes, range(len(sizes))))
    sizes = [sizes[index % len(sizes)] for index in range(settings["images"])]
    watched = Watched(session)
    took = []
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("first", min(len(sizes), IMAGES)), ("all", len(sizes))):
            dataset = _dataset(sizes[:count], files)
            info = run_info(session, "model.onnx", describe_dataset(dataset), protocol)
            watched.seconds = dict.fromkeys(watched.seconds, 0.0)
            begun = time.perf_counter()
            finished = validate(watched, dataset, info, Path(folder) / name, threads=THREADS)
            took.append(time.perf_counter() - begun)
    refused = sum(prediction.refused is not None for prediction in finished.predictions)
    assert refused == 0, f"{refused} of our own JPEGs were refused"
    return {
        **_rates(rig, settings, protocol, sizes, took[1]),
        "first_seconds": took[0],
        "stage_seconds": watched.seconds["stage"],
        "compute_seconds": watched.seconds["compute"],
        "outside_compute": 1 - watched.seconds["compute"] / took[1],
        "threads": THREADS,
        "kilobytes_per_image": sum(map(len, files)) / len(files) / 1e3,
        "batching": info.batching and info.batching.to_json(),
        "memory_gb": rig.used_memory_gb(),
    }


def _jpeg(size: tuple[int, int], seed: int) -> bytes:
    """Return a JPEG that costs to decode what a photo of that size costs: smooth shapes with a little grain."""
    height, width = size
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    grain = rng.normal(0, 8, (height, width, 1)).astype(np.float32)
    file = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
