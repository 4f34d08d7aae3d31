"""Part `throughput`: images per second of whole protocols through the engine, on pictures of ImageNet's sizes.

`views`: images that are already decoded and resized go through the pipeline of `validate`: planning, packing, upload,
compute, averages. `jpegs`: the same from JPEG files in memory, with 16 threads that decode and resize: everything
`validate` does except writing the run folder. The sizes are those of `imagenet_sizes.draw`.

Useful operations are those of the views' own pixels, without padding: `share_of_peak` is what a user gets,
`computed_share_of_peak` what the GPU does.
"""

import io
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common.imagenet_sizes import draw
from benchmarks.common.photos import dataset_in_memory
from benchmarks.common.rig import Rig
from benchmarks.common.runner import Case, Runner
from prelunet.evaluator.contract import ModelContract
from prelunet.evaluator.datasets.dataset import Sample
from prelunet.evaluator.engine.batching import plan_batches
from prelunet.evaluator.engine.classify import average_image
from prelunet.evaluator.engine.memory import gpu_rules, portion_size
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.imaging.views import ViewImage
from prelunet.evaluator.protocols import EvaluationProtocol, build_protocol
from prelunet.evaluator.validation.pipeline import Pipeline, evaluate_chunks
from prelunet.evaluator.validation.run import Batching, build_run_info, describe_dataset
from prelunet.evaluator.validation.timing import StageTimer

IMAGES = 1024  # a chunk on a GPU
IMAGENET = 50_000
THREADS = 16
QUALITY = 95  # of the JPEGs; most of ImageNet's are about 100 kB
PICTURES = IMAGES  # number of different JPEGs, which are repeated
REPEATS = 3
SECONDS = 12  # no repeat starts after this time

# Net, precision, protocol (for a crop of 224), images, images per portion (0: as in `validate`).
VIEWS = (
    ("C", "fp16", "multi-scale", IMAGES, 0),
    ("C", "fp16", "multi-scale", IMAGES, 256),
    ("A", "fp16", "multi-scale", IMAGES, 0),
    ("B", "fp16", "multi-scale", IMAGES, 0),
    ("C", "fp16", "dense-256", IMAGES, 0),
    ("C", "fp16", "dense-384", IMAGES, 0),
    ("A", "fp16", "dense-256", IMAGES, 0),
    ("A", "fp16", "dense-384", IMAGES, 0),
    ("B", "fp16", "dense-256", IMAGES, 0),
    ("B", "fp16", "dense-384", IMAGES, 0),
    ("C", "tf32", "multi-scale", IMAGES // 2, 0),
    ("C", "fp32", "multi-scale", IMAGES // 4, 0),
)
JPEGS = (
    ("C", "fp16", "multi-scale", 2 * IMAGES, 0),  # two chunks
    ("A", "fp16", "dense-256", 4 * IMAGES, 0),
    ("A", "fp16", "multi-scale", 2 * IMAGES, 0),
)

Settings = dict[str, Any]
Size = tuple[int, int]  # height, width


def plan(rig: Rig) -> list[str]:
    """Describe what would be measured, one line per item."""
    return [
        f"{len(VIEWS)} combinations of net, protocol and precision, {rig.reduced(IMAGES)} images each, as views "
        "in memory: A, B, C; dense-256, dense-384, multi-scale; fp16, and C multi-scale in tf32 and fp32; two portion "
        "sizes",
        f"{len(JPEGS)} combinations from JPEGs in memory, with {THREADS} threads",
        "about 6 minutes",
        *(f"planned: {line}" for net in ("C", "A") for line in _planned(rig, net)),
    ]


def _planned(rig: Rig, net: str) -> Iterator[str]:
    """Describe how the views of a chunk would be packed on canvases for an fp16 file; needs no GPU."""
    contract = rig.contract(net, "fp16")
    rules, sizes = gpu_rules(contract, None), draw(IMAGES)
    for name in ("dense-256", "multi-scale"):
        protocol = protocol_of(rig, name, contract)
        for together in (portion_size(protocol, IMAGES, None, gpu=True), 256):
            plans = []
            for start in range(0, IMAGES, together):
                shapes = view_shapes(sizes[start : start + together], protocol)
                plans.append(plan_batches(shapes, contract.window_grid, rules, max_side=contract.max_side))
            padding = 1 - sum(plan.images_pixels for plan in plans) / sum(plan.canvas_pixels for plan in plans)
            changes = sum(plan.canvas_changes for plan in plans)
            yield (
                f"{net} {name}, {IMAGES} images, {together} together: {padding:.1%} padding, "
                f"{changes} changes of shape, {sum(len(plan.batches) for plan in plans)} batches"
            )


def protocol_of(rig: Rig, name: str, contract: ModelContract) -> EvaluationProtocol:
    """Build a protocol from its name for nets with a crop of 224."""
    if name.startswith("dense-"):
        name = f"dense-{rig.px(int(name.removeprefix('dense-')))}"
    return build_protocol(name, contract)


def view_shapes(sizes: Sequence[Size], protocol: EvaluationProtocol) -> list[Size]:
    """Return the size of every view of images of these sizes."""
    return [resized_size(*size, view.scale, protocol.long_side_cap) for size in sizes for view in protocol.views]


def run(rig: Rig, runner: Runner) -> None:
    """Measure all cases, first those of the goals, without and with decoding."""
    order = [("views", VIEWS[0]), *(("jpegs", case) for case in JPEGS[: rig.reduced(len(JPEGS))])]
    order += [("views", case) for case in ((VIEWS[1], VIEWS[4]) if rig.tiny else VIEWS[1:])]
    for what, (net, precision, protocol, images, together) in order:
        if precision not in rig.precisions:
            continue
        settings: Settings = {"what": what, "net": net, "precision": precision, "protocol": protocol}
        settings |= {"images": rig.reduced(images), "together": rig.reduced(together)}
        work = partial(_views if what == "views" else _jpegs, rig, settings)
        runner.measure(Case(settings, work, 60 if net == "C" or what == "jpegs" else 35))


class Work:
    """A session, a protocol, and the portions of `validate`. sizes: of the images, before resizing."""

    def __init__(self, rig: Rig, settings: Settings, sizes: Sequence[Size]) -> None:
        self.rig, self.settings, self.sizes = rig, settings, sizes
        self.memory_before = rig.used_memory_gb()
        self.session: Session = rig.session(settings["net"], settings["precision"])
        self.protocol: EvaluationProtocol = protocol_of(rig, settings["protocol"], self.session.contract)
        if not rig.on_gpu:  # so that a rehearsal has the same kinds of canvases
            self.session.rules = gpu_rules(self.session.contract, None)
        dataset = dataset_in_memory([b"none"], len(sizes))
        info = build_run_info(self.session, "model.onnx", describe_dataset(dataset), self.protocol)
        assert info.batching is not None, "a computed run has batching information"
        self.batching: Batching = info.batching
        self.together = settings["together"] or self.batching.images_together
        self.chunk = max(info.chunk, self.together)

    def result(self, seconds: float, first: float, timer: StageTimer) -> dict[str, Any]:
        """Return images per second, shares of the peak, batches, and the time for ImageNet's validation images."""
        totals, images = timer.totals(), len(self.sizes)
        canvases = [(size[1], size[2]) for size, count in timer.canvases().items() for _ in range(size[0] * count)]
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
            "different_canvases": len(timer.canvases()),
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
    passes: list[tuple[float, StageTimer]] = []
    while len(passes) < rig.reduced(1 + REPEATS) and (len(passes) < 2 or sum(took for took, _ in passes) < SECONDS):
        timer, begun = StageTimer(), time.perf_counter()
        # The pipeline of `validate`, but with views instead of files.
        with closing(Pipeline([work.session], portions, lambda one: views[int(one.file)], THREADS, timer)) as line:
            for portion in line.finished():
                in_order = [portion.results[index] for index in range(len(portion.results))]
                for first in range(0, len(in_order), len(work.protocol.views)):
                    average_image(work.protocol, in_order[first : first + len(work.protocol.views)])
        passes.append((time.perf_counter() - begun, timer))
    by_time = sorted(passes[1:], key=lambda one: one[0])
    seconds, of_it = by_time[(len(by_time) - 1) // 2]  # one pass, so that stages and seconds belong together
    return work.result(seconds, passes[0][0], of_it)


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
        files = list(pool.map(_jpeg, different, range(len(different))))
    work = Work(rig, settings, [different[index % len(different)] for index in range(settings["images"])])
    took = []
    for count in (len(different), len(work.sizes)):
        dataset = dataset_in_memory(files, count)
        chunks = [dataset.samples[start : start + work.chunk] for start in range(0, count, work.chunk)]
        timer, begun = StageTimer(), time.perf_counter()
        evaluated = evaluate_chunks([work.session], dataset, work.protocol, chunks, work.together, THREADS, timer=timer)
        for predictions, _scores in evaluated:
            assert not any(prediction.refused for prediction in predictions), "our own JPEGs were refused"
        took.append(time.perf_counter() - begun)
    size = sum(map(len, files)) / len(files) / 1e3
    return {**work.result(took[1], took[0], timer), "threads": THREADS, "kilobytes_per_image": size}


def _jpeg(size: tuple[int, int], seed: int) -> bytes:
    """Return a JPEG as expensive to decode as a photo of this size: smooth shapes with a little grain."""
    height, width = size
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    grain = rng.normal(0, 8, (height, width, 1)).astype(np.float32)
    file = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
