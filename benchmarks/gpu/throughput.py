"""Part `throughput`: images per second of whole protocols through the engine, on pictures of ImageNet's sizes.

`views`: images that are already decoded and resized go through the pipeline of `validate`: planning, packing, upload,
compute, averages. `torch`: the same photos in eager torch (mixed_shapes.py). `jpegs`: the engine from JPEG files in
memory, with 16 threads that decode and resize: everything `validate` does except writing the run folder. The sizes are
those of `imagenet_sizes.draw`.

Useful operations are those of the views' own pixels, without padding: `share_of_peak` is what a user gets,
`computed_share_of_peak` what the GPU does.
"""

import io
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common.imagenet_sizes import draw
from benchmarks.common.photos import dataset_in_memory
from benchmarks.common.rig import Rig
from benchmarks.common.runner import Case
from benchmarks.gpu import mixed_shapes
from prelunet.evaluator.datasets.dataset import Sample
from prelunet.evaluator.engine.classify import average_image
from prelunet.evaluator.engine.memory import gpu_rules
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.imaging.views import ViewImage
from prelunet.evaluator.protocols import EvaluationProtocol, build_protocol
from prelunet.evaluator.validation.pipeline import Pipeline, PreparedViews, evaluate_chunks
from prelunet.evaluator.validation.run import Batching, build_run_info, describe_dataset
from prelunet.evaluator.validation.timing import StageTimer

PROTOCOL = "multi-scale"
IMAGES = 512
JPEGS = 1024  # a chunk on a GPU
IMAGENET = 50_000
THREADS = 16
QUALITY = 95  # of the JPEGs; most of ImageNet's are about 100 kB
PICTURES = 512  # number of different JPEGs, which are repeated
REPEATS = 3
SECONDS = 12  # no repeat starts after this time
PLAN = (
    f"A and C, {PROTOCOL}, fp16: {IMAGES} images as views in memory, of mixed shapes; A from {JPEGS} JPEGs, too, with "
    f"{THREADS} threads",
    "the same views of A in eager torch with its default settings, in mirrored pairs and in groups of equal shapes",
    "what a change of shape costs A",
    "about 3 minutes",
)

Settings = dict[str, Any]
Size = tuple[int, int]  # height, width


def view_shapes(sizes: Sequence[Size], protocol: EvaluationProtocol) -> list[Size]:
    """Return the size of every view of images of these sizes."""
    return [resized_size(*size, view.scale, protocol.long_side_cap) for size in sizes for view in protocol.views]


def cases(rig: Rig) -> Iterator[Case]:
    """Yield the cases: A's are compared with torch."""

    def case(what: str, net: str, images: int, work: Callable[[Rig, Settings], dict[str, Any]], seconds: float) -> Case:
        settings: Settings = {"what": what, "net": net, "precision": "fp16", "images": rig.reduced(images)}
        return Case(settings, partial(work, rig, settings), seconds)

    yield case("views", "A", IMAGES, _views, 25)
    for way in mixed_shapes.WAYS:
        yield case(f"torch {way}", "A", IMAGES, partial(_torch, way=way), 25)
    yield case("changes of shape", "A", 0, mixed_shapes.changes_of_shape, 10)
    yield case("jpegs", "A", JPEGS, _jpegs, 45)
    yield case("views", "C", IMAGES, _views, 45)


class CanvasTimer(StageTimer):
    """A timer that also counts the batches by canvas: rows, height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.canvases: Counter[tuple[int, int, int]] = Counter()

    def batch_packed(self, canvas: tuple[int, int, int], views: list[tuple[int, int]], *, changed: bool) -> None:
        self.canvases[canvas] += 1
        super().batch_packed(canvas, views, changed=changed)


class Work:
    """A session, a protocol, and the portions of `validate`. sizes: of the images, before resizing."""

    def __init__(self, rig: Rig, settings: Settings, sizes: Sequence[Size]) -> None:
        self.rig, self.settings, self.sizes = rig, settings, sizes
        self.memory_before = rig.used_memory_gb()
        self.session: Session = rig.session(settings["net"], settings["precision"])
        self.protocol: EvaluationProtocol = build_protocol(PROTOCOL, self.session.contract)
        if not rig.on_gpu:  # so that a rehearsal has the same kinds of canvases
            self.session.rules = gpu_rules(self.session.contract, None)
        dataset = dataset_in_memory([b"none"], len(sizes))
        info = build_run_info(self.session, "model.onnx", describe_dataset(dataset), self.protocol)
        assert info.batching is not None, "a computed run has batching information"
        self.batching: Batching = info.batching
        self.together = self.batching.images_together
        self.chunk = max(info.chunk, self.together)

    def result(self, seconds: float, first: float, timer: CanvasTimer) -> dict[str, Any]:
        """Return images per second, shares of the peak, batches, and the time for ImageNet's validation images."""
        totals, images = timer.totals(), len(self.sizes)
        canvases = [(size[1], size[2]) for size, count in timer.canvases.items() for _ in range(size[0] * count)]
        net, precision = self.settings["net"], self.settings["precision"]
        shapes = view_shapes(self.sizes, self.protocol)
        useful = self.rig.rates(images, self.rig.flop(net, shapes), seconds, precision)
        computed = self.rig.rates(images, self.rig.flop(net, canvases), seconds, precision)
        memory = self.rig.used_memory_gb()
        return {
            **useful,
            "seconds": seconds,
            "first_seconds": first,
            "minutes_for_imagenet": IMAGENET * seconds / images / 60,
            "tflop_per_image": useful["tflops"] * seconds / images,
            "computed_share_of_peak": computed["share_of_peak"],
            "padding": totals.padding,
            "batches": totals.batches,
            "changes_of_shape": totals.canvas_changes,
            "different_canvases": len(timer.canvases),
            "rows_per_batch": len(canvases) / totals.batches,
            "compute_share": totals.seconds["compute"] / seconds,
            "stages": {stage: round(spent, 4) for stage, spent in totals.seconds.items()},
            "memory_gb": None if memory is None else round(memory - (self.memory_before or 0), 2),
            "images_together": self.together,
            "batching": self.batching.to_json(),
            "provider": self.session.circumstances.provider,
        }


def _views(rig: Rig, settings: Settings) -> dict[str, Any]:
    """Run views in memory several times; the first pass is reported separately, since its shapes are new."""
    work = Work(rig, settings, draw(settings["images"]))
    views = resized_noise(work.sizes, work.protocol)
    numbers = [Sample(str(index), 0, 1) for index in range(len(views))]
    portions = [numbers[start : start + work.together] for start in range(0, len(numbers), work.together)]
    passes: list[tuple[float, CanvasTimer]] = []

    def prepared(sample: Sample) -> PreparedViews:
        return PreparedViews(views[int(sample.file)], ())

    while len(passes) < rig.reduced(1 + REPEATS) and (len(passes) < 2 or sum(took for took, _ in passes[1:]) < SECONDS):
        timer, begun = CanvasTimer(), time.perf_counter()
        # The pipeline of `validate`, but with views instead of files.
        with closing(Pipeline([work.session], portions, prepared, THREADS, timer)) as line:
            for portion in line.finished():
                in_order = [portion.results[index] for index in range(len(portion.results))]
                for first in range(0, len(in_order), len(work.protocol.views)):
                    average_image(work.protocol, in_order[first : first + len(work.protocol.views)])
        passes.append((time.perf_counter() - begun, timer))
    by_time = sorted(passes[1:], key=lambda one: one[0])
    seconds, of_it = by_time[(len(by_time) - 1) // 2]  # one pass, so that stages and seconds belong together
    return work.result(seconds, passes[0][0], of_it)


def _torch(rig: Rig, settings: Settings, *, way: str) -> dict[str, Any]:
    """Run the same views in eager torch."""
    sizes, protocol = draw(settings["images"]), build_protocol(PROTOCOL, rig.contract(settings["net"]))
    views = [view.image for of_image in resized_noise(sizes, protocol) for view in of_image]
    first, seconds = mixed_shapes.torch_seconds(rig, settings["net"], views, way)
    flop = rig.flop(settings["net"], view_shapes(sizes, protocol))
    return {**rig.rates(len(sizes), flop, seconds, "fp16"), "seconds": seconds, "first_seconds": first}


def resized_noise(sizes: Sequence[Size], protocol: EvaluationProtocol) -> list[list[ViewImage]]:
    """Return the views of images of these sizes, each cut from another place of one large picture of noise."""
    cap, scales = protocol.long_side_cap, protocol.scales
    shapes = [{scale: resized_size(*size, scale, cap) for scale in scales} for size in sizes]
    largest = [max(shape[axis] for of_image in shapes for shape in of_image.values()) for axis in (0, 1)]
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (largest[0] + 1024, largest[1] + 1024, 3), np.uint8)
    views = []
    for of_image in shapes:
        top, left = (int(place) for place in rng.integers(0, 1024, 2))
        plain = {scale: noise[top : top + h, left : left + w] for scale, (h, w) in of_image.items()}
        views.append(
            [
                ViewImage(view, plain[view.scale][:, ::-1] if view.mirrored else plain[view.scale], capped=False)
                for view in protocol.views
            ]
        )
    return views


def _jpegs(rig: Rig, settings: Settings) -> dict[str, Any]:
    """Evaluate JPEGs in memory, after one pass over the different ones, so that no shape is new."""
    different = draw(rig.reduced(PICTURES))
    with ThreadPoolExecutor(THREADS) as pool:
        files = list(pool.map(jpeg, different, range(len(different))))
    work = Work(rig, settings, [different[index % len(different)] for index in range(settings["images"])])
    took = []
    for count in (len(different), len(work.sizes)):
        dataset = dataset_in_memory(files, count)
        chunks = [dataset.samples[start : start + work.chunk] for start in range(0, count, work.chunk)]
        timer, begun = CanvasTimer(), time.perf_counter()
        evaluated = evaluate_chunks([work.session], dataset, work.protocol, chunks, work.together, THREADS, timer=timer)
        for predictions, _scores in evaluated:
            assert not any(prediction.refused for prediction in predictions), "our own JPEGs were refused"
        took.append(time.perf_counter() - begun)
    size = sum(map(len, files)) / len(files) / 1e3
    return {**work.result(took[1], took[0], timer), "threads": THREADS, "kilobytes_per_image": size}


def jpeg(size: tuple[int, int], seed: int) -> bytes:
    """Return a JPEG as expensive to decode as a photo of this size: smooth shapes with a little grain."""
    height, width = size
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    grain = rng.normal(0, 8, (height, width, 1)).astype(np.float32)
    file = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
