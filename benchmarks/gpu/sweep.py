"""Part `sweep`: the cost of each option of the CUDA provider, each batch size and each change of shape.

Sessions are opened directly in onnxruntime, with our options and one change. Inputs are on the device already and
outputs stay there, so that only the graph is timed.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from benchmarks.common.rig import Rig, Timing
from benchmarks.common.runner import Case, Runner
from benchmarks.gpu.device import noise_batch, provider_options, raw_session
from benchmarks.gpu.graphs import graphs_case, with_padded_conv1
from benchmarks.gpu.uploads import upload_case
from prelunet.evaluator.contract import INPUTS, OUTPUTS
from prelunet.evaluator.engine.runtimes.onnx import import_runtime

NETS = ("C", "A")  # C first: the goals are about it
CANVAS = (384, 512)
BATCH = 8  # images, for the sets of options
# Six shapes of two images each, like mirrored pairs of different photos.
SHAPES = ((256, 352), (352, 256), (256, 384), (384, 512), (512, 384), (384, 576))
TURNS = 24  # calls with a change of shape before each; a multiple of the number of shapes
LADDER = (1, 2, 4, 8, 16, 32, 64)
LADDER_CANVASES = ((224, 224), (256, 352), (480, 640))
MAX_PIXELS = 16 * 480 * 640  # limit of a batch in `batch` cases
SEARCHES = ("HEURISTIC", "EXHAUSTIVE", "DEFAULT")
CONV1_CHANNELS = (3, 4, 8)
THREAD_RUNS = 8

Shape = tuple[int, int, int]  # images, height, width


def plan(rig: Rig) -> list[str]:
    """Describe what would be measured, one line per item."""
    options = [settings for net in NETS for settings in _option_settings(rig, net)]
    return [
        f"{len(options)} sets of options ({', '.join(NETS)}): search, NHWC, fused bias, precision; each with repeated "
        "and with alternating shapes; about 3 minutes",
        f"batches of {', '.join(map(str, LADDER))} on {len(LADDER_CANVASES)} canvases; about 1 minute",
        "masks (ragged against exact), conv1 with 4 and 8 input channels, memory by threads, uploads, CUDA graphs; "
        "about 2 minutes",
    ]


def run(rig: Rig, runner: Runner) -> None:
    """Measure all cases. CUDA graphs come last: a failing capture can end the process."""
    nets = NETS[: rig.reduced(len(NETS), 1)]
    for net in nets:
        runner.run(_cases(rig, net))
    runner.run(upload_case(rig, net) for net in nets)
    runner.run(graphs_case(rig, net, split=split) for split in (True, False) for net in nets)


def _cases(rig: Rig, net: str) -> Iterator[Case]:
    for settings in _option_settings(rig, net):
        slow = settings["search"] == "DEFAULT" or settings["precision"] == "fp32"
        yield Case(settings, partial(_options, rig, settings), 40 if slow else 20)
    of_net = {"net": net, "precision": "fp16"}
    for height, width in LADDER_CANVASES:
        settings = {"what": "batch", **of_net, "height": height, "width": width}
        yield Case(settings, partial(_ladder, rig, net, height, width), 20)
    yield Case({"what": "masks", **of_net}, partial(_masks, rig, net), 25)
    for channels in CONV1_CHANNELS:
        yield Case({"what": "conv1", **of_net, "channels": channels}, partial(_conv1, rig, net, channels), 25)
    yield Case({"what": "threads", **of_net}, partial(_threads, rig, net), 30)


def _option_settings(rig: Rig, net: str) -> list[dict[str, Any]]:
    """Return the sets of options: all of NHWC x fused bias; the slow search only with our options; one set on a CPU."""
    if not rig.on_gpu:
        return [_setting(net, precision, "none", 0, 0) for precision in rig.precisions]
    both = [(nhwc, bias) for nhwc in (1, 0) for bias in (1, 0)]
    fp16 = [_setting(net, "fp16", search, *pair) for search in SEARCHES[:2] for pair in both]
    fp16.append(_setting(net, "fp16", "DEFAULT", 1, 1))
    single = [_setting(net, precision, "HEURISTIC", *pair) for precision in ("tf32", "fp32") for pair in both]
    return fp16 + single


def _setting(net: str, precision: str, search: str, nhwc: int, bias: int) -> dict[str, Any]:
    return {"what": "options", "net": net, "precision": precision, "search": search, "nhwc": nhwc, "fuse_bias": bias}


class BoundSession:
    """A raw session whose inputs and outputs stay on the device."""

    def __init__(self, rig: Rig, session: Any) -> None:
        self.rig, self.session = rig, session
        self._value = import_runtime().OrtValue

    def upload(self, shape: Shape, seed: int = 0) -> list[Any]:
        """Upload a batch of noise."""
        return [self._value.ortvalue_from_numpy(array, self.rig.device, 0) for array in noise_batch(*shape, seed)]

    def run(self, values: list[Any]) -> list[Any]:
        """Run an uploaded batch; return the outputs, which stay on the device."""
        binding = self.session.io_binding()
        for name, value in zip(INPUTS, values, strict=True):
            binding.bind_ortvalue_input(name, value)
        for name in OUTPUTS:
            binding.bind_output(name, self.rig.device, 0)
        self.session.run_with_iobinding(binding)
        return list(binding.get_outputs())


def _options(rig: Rig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Time one set of options: a full batch, six shapes separately, and the same shapes in turn."""
    changes = {
        "cudnn_conv_algo_search": settings["search"],
        "prefer_nhwc": str(settings["nhwc"]),
        "fuse_conv_bias": str(settings["fuse_bias"]),
        "use_tf32": str(int(settings["precision"] == "tf32")),
    }
    session = raw_session(rig, rig.model_file(settings["net"], settings["precision"]), changes)
    bound = BoundSession(rig, session)
    shape = (rig.reduced(BATCH), rig.px(CANVAS[0]), rig.px(CANVAS[1]))
    rate = _rate(rig, bound, settings["net"], shape, settings["precision"])
    return {"provider_options": provider_options(rig, session), **rate, **_changes_of_shape(rig, bound)}


def _rate(rig: Rig, bound: BoundSession, net: str, shape: Shape, precision: str) -> dict[str, Any]:
    """Time one shape repeatedly."""
    values = bound.upload(shape)
    timing: Timing = rig.timed(lambda: bound.run(values))
    rows, height, width = shape
    rates = rig.rates(rows, rig.flop(net, [(height, width)] * rows), timing["ms"] / 1e3, precision)
    return {"shape": list(shape), **timing, **rates, "memory_gb": rig.used_memory_gb()}


def _changes_of_shape(rig: Rig, bound: BoundSession) -> dict[str, Any]:
    """Time pairs of images of six shapes: each repeated, then two and all six in turn.

    switch_ms: extra time of a call after one of another shape; `evaluator.engine.memory.GPU_SWITCH_SECONDS` assumes it.
    """
    batches = [bound.upload((2, rig.px(height), rig.px(width)), seed) for seed, (height, width) in enumerate(SHAPES)]
    repeated = [rig.timed(partial(bound.run, values), seconds=0.05)["ms"] for values in batches]
    found: dict[str, Any] = {"repeated_ms": float(np.mean(repeated))}
    for count in (2, len(batches)):
        turns = rig.reduced(TURNS, count)
        order = list(islice(cycle(batches[:count]), turns))
        for values in order[:count]:
            bound.run(values)  # warm-up round, so that no shape is new
        took = [rig.timed(partial(bound.run, values), seconds=0, min_calls=1, warm=0)["ms"] for values in order]
        found[f"alternating_{count}_ms"] = float(np.mean(took))
        found[f"switch_{count}_ms"] = float(np.mean(took) - np.mean(repeated[:count]))
    return found


def _ladder(rig: Rig, net: str, height: int, width: int) -> dict[str, Any]:
    """Time batches of increasing size on one canvas."""
    bound = BoundSession(rig, raw_session(rig, rig.model_file(net, "fp16")))
    size = (rig.px(height), rig.px(width))
    steps = [rows for rows in LADDER[: rig.reduced(len(LADDER))] if rows * height * width <= MAX_PIXELS]
    found = [_rate(rig, bound, net, (rows, *size), "fp16") for rows in steps]
    best = max(found, key=lambda step: step["images_per_second"])
    return {"best_batch": best["shape"][0], "best_images_per_second": best["images_per_second"],
            "best_share_of_peak": best["share_of_peak"], "steps": found}  # fmt: skip


def _masks(rig: Rig, net: str) -> dict[str, Any]:
    """Time the same batch in a ragged and an exact file, in turn: the cost of the masks."""
    bound = {
        canvas: BoundSession(rig, raw_session(rig, rig.model_file(net, "fp16", canvas)))
        for canvas in ("ragged", "exact")
    }
    shape = (rig.reduced(BATCH), rig.px(CANVAS[0]), rig.px(CANVAS[1]))
    values = {canvas: one.upload(shape) for canvas, one in bound.items()}
    times: dict[str, list[float]] = {canvas: [] for canvas in bound}
    for _ in range(rig.reduced(5, 1)):
        for canvas, one in bound.items():
            times[canvas].append(rig.timed(partial(one.run, values[canvas]), seconds=0.2)["ms"])
    medians = {f"{canvas}_ms": float(np.median(found)) for canvas, found in times.items()}
    return {"shape": list(shape), **medians, "masks_cost": medians["ragged_ms"] / medians["exact_ms"] - 1}


def _conv1(rig: Rig, net: str, channels: int) -> dict[str, Any]:
    """Time a file whose image and conv1 are padded with channels of zeros, which suits tensor cores.

    off: deviation of its scores from those of the unmodified file.
    """
    shape = (rig.reduced(BATCH), rig.px(CANVAS[0]), rig.px(CANVAS[1]))
    path = rig.model_file(net, "fp16")
    plain = BoundSession(rig, raw_session(rig, path))
    exact = plain.run(plain.upload(shape))[0].numpy()
    if channels == 3:
        return {**_rate(rig, plain, net, shape, "fp16"), "off": 0.0}
    del plain
    wider = with_padded_conv1(path, channels)
    bound = BoundSession(rig, raw_session(rig, wider))
    wider.unlink()
    off = float(np.abs(bound.run(bound.upload(shape))[0].numpy() - exact).max())
    return {**_rate(rig, bound, net, shape, "fp16"), "off": off}


def _threads(rig: Rig, net: str) -> dict[str, Any]:
    """Run a batch repeatedly, in one thread and in a new thread each time; return the growth of the GPU's memory.

    The provider keeps handles and scratch memory for each thread, so that a pipeline that computes in new threads would
    fill the GPU (onnxruntime issue 29351). The first run does not count.
    """
    shape = (rig.reduced(BATCH), rig.px(CANVAS[0]), rig.px(CANVAS[1]))
    runs = rig.reduced(THREAD_RUNS)
    result: dict[str, Any] = {"runs": runs}
    for name in ("same", "fresh"):
        bound = BoundSession(rig, raw_session(rig, rig.model_file(net, "fp16")))
        values = bound.upload(shape)
        with ThreadPoolExecutor(1) as first:
            first.submit(bound.run, values).result()
            before, begun = rig.used_memory_gb(), time.perf_counter()
            for _ in range(runs):
                with nullcontext(first) if name == "same" else ThreadPoolExecutor(1) as pool:
                    pool.submit(bound.run, values).result()
            rig.wait()
            result[f"{name}_ms"] = 1e3 * (time.perf_counter() - begun) / runs
            after = rig.used_memory_gb()
        result[f"{name}_gb"] = None if before is None or after is None else round(after - before, 2)
        del bound, values
    return result
