"""Part `torch`: the engine compared with eager and compiled torch, in half precision with channels last.

`canvas`: one shape repeatedly, pixels already on the GPU: the quality of the kernels. `mixed`: photos of ImageNet's
sizes at the scales of `multi-scale`, pixels in host memory, written as good torch code: exact shapes, in pairs (a view
and its mirror image) or in groups of equal shapes, uploaded asynchronously from page-locked memory, and all scores read
back once; compared with the engine's pipeline and its canvases. Of three passes the faster of the last two counts, in
which no shape is new; the first is reported too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common.dense_torch import DenseNet
from benchmarks.common.imagenet_sizes import draw
from benchmarks.common.nets import MEAN
from benchmarks.common.rig import Rig, tf32
from benchmarks.common.runner import Case, Runner
from benchmarks.gpu.device import check_provider, raw_session
from benchmarks.gpu.sweep import BoundSession
from benchmarks.gpu.throughput import THREADS, Work, resized_noise
from prelunet.evaluator.datasets.dataset import Sample
from prelunet.evaluator.imaging.views import ViewImage
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.pipeline import Pipeline
from prelunet.evaluator.validation.timing import StageTimer

NETS = ("C", "A")
CANVASES = ((8, 384, 512), (8, 256, 352), (4, 480, 640))  # images, height, width; a rehearsal uses the first
IMAGES = 48
MAX_PIXELS = 16 * 384 * 512  # limit for a group of equal shapes
SLOWEST = 150  # seconds after which the three passes are abandoned

Settings = dict[str, Any]


class TooSlow(Exception):  # noqa: N818 - a result rather than a fault
    """A pass would take minutes; the text states how far it got."""


def plan(rig: Rig) -> list[str]:
    """Describe what would be measured, one line per item."""
    found = [settings for settings, _ in _all_settings(rig)]
    return [
        f"{sum(s['what'] == 'canvas' for s in found)} cases of one canvas: engine, eager, eager with "
        "cudnn.benchmark, compiled; A and C",
        f"{sum(s['what'] == 'mixed' for s in found)} cases of {rig.reduced(IMAGES, 1)} mixed-shape photos, multi-scale",
        "about 7 minutes, mostly for cudnn.benchmark and the compiler",
    ]


def run(rig: Rig, runner: Runner) -> None:
    """Measure all cases; if the engine's provider is unavailable, torch alone."""
    engine = True
    try:
        check_provider(rig)
    except SystemExit as reason:
        engine = False
        print(f"skipping the engine: {reason}")
    for settings, seconds in _all_settings(rig):
        if settings["competitor"] == "engine" and not engine:
            continue
        work = _canvas if settings["what"] == "canvas" else _mixed
        runner.measure(Case(settings, partial(_with_clean_state, rig, partial(work, rig, settings)), seconds))


def _all_settings(rig: Rig) -> Iterator[tuple[Settings, float]]:
    """Yield settings and seconds, the slowest cases last."""
    for net in NETS[: rig.reduced(len(NETS), 1)]:
        for way, competitor in (("pipeline", "engine"), ("pairs", "eager"), ("groups", "eager")):
            yield {"what": "mixed", "net": net, "competitor": competitor, "way": way}, 30
        for canvas in CANVASES[: rig.reduced(len(CANVASES), 1)]:
            for competitor in ("engine", "eager", "eager-benchmark"):
                yield {"what": "canvas", "net": net, "competitor": competitor, "canvas": list(canvas)}, 20
    slow = 150 if rig.on_gpu else 10
    yield {"what": "canvas", "net": "C", "competitor": "compiled", "canvas": list(CANVASES[0])}, 80
    yield {"what": "mixed", "net": "C", "competitor": "eager-benchmark", "way": "pairs"}, slow
    if not rig.tiny:
        yield {"what": "mixed", "net": "C", "competitor": "compiled", "way": "pairs"}, slow
    for net, canvas in (("C", CANVASES[1]), ("C", CANVASES[2]), ("A", CANVASES[0]))[: rig.reduced(3, 0)]:
        yield {"what": "canvas", "net": net, "competitor": "compiled", "canvas": list(canvas)}, 80


def _with_clean_state(rig: Rig, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a case and restore torch's state."""
    try:
        return work()
    finally:
        torch.backends.cudnn.benchmark = False
        torch._dynamo.reset()
        if rig.on_gpu:
            torch.cuda.empty_cache()


def _net(rig: Rig, settings: Settings) -> Any:
    """Return the net of a competitor, from a uint8 tensor (N, H, W, 3) on the device to scores."""
    net = DenseNet(rig.torch_net(settings["net"]), MEAN, dtype=torch.float16, channels_last=True).to(rig.device).eval()
    torch.backends.cudnn.benchmark = settings["competitor"] == "eager-benchmark"
    if settings["competitor"] != "compiled":
        return net
    backend = "inductor" if rig.on_gpu else "eager"  # a rehearsal compiles nothing, as that takes a minute
    return torch.compile(net, dynamic=settings["what"] == "mixed", backend=backend)


def _canvas(rig: Rig, settings: Settings) -> dict[str, Any]:
    """Time one shape whose pixels are on the device. off: deviation from torch in float32 without TF32."""
    rows, height, width = settings["canvas"]
    shape = rows, height, width = rig.reduced(rows), rig.px(height), rig.px(width)
    images = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    begun = time.perf_counter()
    if settings["competitor"] == "engine":
        bound = BoundSession(rig, raw_session(rig, rig.model_file(settings["net"], "fp16")))
        values = bound.upload(shape)
        scores = bound.run(values)[0].numpy()
        timing = rig.timed(lambda: bound.run(values))
    else:
        net, pixels = _net(rig, settings), torch.from_numpy(images).to(rig.device)
        with torch.inference_mode():
            scores = net(pixels).float().cpu().numpy()
            timing = rig.timed(lambda: net(pixels))
    with tf32(allowed=False):
        exact = DenseNet(rig.torch_net(settings["net"]), MEAN).to(rig.device).eval().scores(images)
    flop = rig.flop(settings["net"], [(height, width)] * rows)
    return {
        **timing,
        **rig.rates(rows, flop, timing["ms"] / 1e3, "fp16"),
        "off": float(np.abs(exact - scores).max()),
        "seconds_in_all": time.perf_counter() - begun,
        "memory_gb": rig.used_memory_gb(),
    }


def _mixed(rig: Rig, settings: Settings) -> dict[str, Any]:
    """Time three passes over photos of mixed shapes."""
    sizes = draw(rig.reduced(IMAGES, 1))
    views = resized_noise(sizes, build_protocol("multi-scale", rig.contract(settings["net"])))
    if settings["competitor"] == "engine":
        work = Work(rig, {**settings, "precision": "fp16", "protocol": "multi-scale", "together": 0}, sizes)
        one_pass = partial(_engine_pass, work, views)
    else:
        end = time.perf_counter() + SLOWEST
        one_pass = partial(_torch_pass, rig, _net(rig, settings), _batches(views, settings["way"]), end)
    try:
        took = [one_pass() for _ in range(3)]
    except TooSlow as reason:
        return {"images": len(sizes), "too_slow": str(reason)}
    seconds = min(took[1:])
    shapes = [view.image.shape[:2] for of_image in views for view in of_image]
    return {
        "images": len(sizes),
        "different_shapes": len(set(shapes)),
        **rig.rates(len(sizes), rig.flop(settings["net"], shapes), seconds, "fp16"),
        "first_seconds": took[0],
        "seconds": seconds,
    }


def _engine_pass(work: Work, views: Sequence[list[ViewImage]]) -> float:
    """Return the seconds of the pipeline of `validate` on these views."""
    numbers = [Sample(str(index), 0, 1) for index in range(len(views))]
    begun = time.perf_counter()
    line = Pipeline([work.session], [numbers], lambda sample: views[int(sample.file)], THREADS, StageTimer())
    with closing(line):
        for portion in line.finished():
            assert len(portion.results) == sum(map(len, views)), "views are missing"
    return time.perf_counter() - begun


def _batches(views: Sequence[list[ViewImage]], way: str) -> list[np.ndarray]:
    """Return the views as arrays (N, H, W, 3) of exact shapes: mirrored pairs in order, or grouped by shape."""
    if way == "pairs":
        pairs = (of_image[first : first + 2] for of_image in views for first in range(0, len(of_image), 2))
        return [np.stack([view.image for view in pair]) for pair in pairs]
    groups: dict[tuple[int, ...], list[np.ndarray]] = {}
    for view in (view for of_image in views for view in of_image):
        groups.setdefault(view.image.shape, []).append(view.image)
    batches = []
    for (height, width, _), images in groups.items():
        limit = max(1, MAX_PIXELS // (height * width))
        batches += [np.stack(images[start : start + limit]) for start in range(0, len(images), limit)]
    return batches


@torch.inference_mode()
def _torch_pass(rig: Rig, net: Any, batches: Sequence[np.ndarray], end: float) -> float:
    """Return the seconds for uploading and computing the batches and reading the scores back.

    end: on the clock of perf_counter; raises TooSlow after it.
    """
    begun, scores = time.perf_counter(), []
    for index, images in enumerate(batches):
        pixels = torch.from_numpy(images)
        scores.append(net((pixels.pin_memory() if rig.on_gpu else pixels).to(rig.device, non_blocking=True)))
        if (now := time.perf_counter()) > end:
            raise TooSlow(f"abandoned after {index + 1} of {len(batches)} batches of a pass, in {now - begun:.0f} s")
    torch.cat(scores).cpu()
    return time.perf_counter() - begun
