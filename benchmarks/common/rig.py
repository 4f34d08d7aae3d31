"""A device with the nets that run on it: model files, sessions, timing, and peak rates.

Imports only torch, onnx, onnxruntime, numpy, Pillow and msgspec: a borrowed GPU machine has nothing else, and the
project is not installed there.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.nets import MEAN, class_entries, discriminating_tensors
from benchmarks.common.results import digest_of, significant
from prelunet.evaluator.architectures import Architecture, Conv, Pool, architecture, multiply_adds
from prelunet.evaluator.contract import Canvas, FilePrecision, ModelContract
from prelunet.evaluator.engine.load import open_with_placement
from prelunet.evaluator.engine.runtimes import Device
from prelunet.evaluator.engine.runtimes.base import Precision
from prelunet.evaluator.engine.session import Placement, Session
from prelunet.export.dense.build import build_contract, build_model
from prelunet.training.net.network import PreluNet, load_tensors

CROP = 224  # pixels, of the measured nets; all lengths in this benchmark refer to it
# Files that determine the contents of a model file.
MAKE_FILES = ("export", "evaluator/contract.py", "evaluator/architectures.py", "training/net/initialization.py",
              "benchmarks/common/nets.py")  # fmt: skip
PEAK_SIDE = 8192  # side of the matrices whose product defines the peak

# Stand-ins for --tiny: a crop of 28 pixels, an eighth of the real one. E keeps its 2x2 convolutions.
TINY = architecture("demo")
TINY_E = Architecture(
    "E",
    (
        Conv("conv1", 12, kernel=3, stride=2, pad=1),
        Pool("pool1", kernel=2, stride=2),
        Conv("conv2_1", 16, kernel=2, pad=0),
        Conv("conv2_2", 16, kernel=2, pad=1),
    ),
    spp_levels=(3, 2, 1),
    hidden=32,
    crop=28,
)

Timing = dict[str, float | int]


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in torch's products and convolutions within the block."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@dataclass
class Rig:
    """A device and the nets that run on it.

    device: `cuda` or `cpu`; tiny: small nets and pictures, few repeats; files: folder for model files, which are kept,
    since a model C takes a while to write.
    """

    device: Device
    tiny: bool
    files: Path
    peaks: Mapping[str, float] = field(default_factory=dict)  # TFLOP/s, see `measure_peaks`
    _drawn: tuple[str, Mapping[str, np.ndarray]] | None = None

    @property
    def on_gpu(self) -> bool:
        """Return whether the device is a GPU; a CPU is only for rehearsals."""
        return self.device == "cuda"

    @property
    def classes(self) -> int:
        """Return the number of classes of all nets."""
        return 10 if self.tiny else 1000

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Return the precisions of this device."""
        return ("fp16", "tf32", "fp32") if self.on_gpu else ("fp16", "fp32")

    def px(self, length: int) -> int:
        """Scale a length for crops of 224 pixels to the crop of the nets in use."""
        return -(-length * TINY.crop // CROP) if self.tiny else length

    def reduced(self, count: int, at_most: int = 2) -> int:
        """Return `count`, limited to `at_most` in a rehearsal."""
        return min(count, at_most) if self.tiny else count

    def net(self, name: str) -> Architecture:
        """Return an architecture of the paper, or its stand-in."""
        if not self.tiny:
            return architecture(name)
        return TINY_E if name == "E" else TINY

    def tensors(self, name: str) -> Mapping[str, np.ndarray]:
        """Return the weights of `nets.discriminating_tensors`; those of the last net are cached (C: 1.3 GB)."""
        if self._drawn is None or self._drawn[0] != name:
            self._drawn = None
            self._drawn = (name, discriminating_tensors(self.net(name), self.classes))
        return self._drawn[1]

    def torch_net(self, name: str) -> PreluNet:
        """Return the torch net on the device, in eval mode."""
        net = PreluNet(self.net(name), self.classes)
        load_tensors(net, self.tensors(name))
        return net.to(self.device).eval()

    def contract(self, name: str, precision: str = "fp32", canvas: Canvas = "ragged") -> ModelContract:
        """Return the contract of a net's model file; precision: `fp32` (also for tf32) or `fp16`."""
        classes = class_entries(self.classes)
        half: FilePrecision = "fp16" if precision == "fp16" else "fp32"
        return build_contract(self.net(name), classes, canvas, half, checkpoint_sha256="0" * 64)

    def model_file(self, name: str, precision: str = "fp32", canvas: Canvas = "ragged") -> Path:
        """Return the path of a net's model file; it is written if it does not exist."""
        contract = self.contract(name, precision, canvas)
        kind, source = "tiny-" if self.tiny else "", digest_of(*MAKE_FILES)
        path = self.files / f"{kind}{name}-{contract.precision}-{canvas}-{source}.onnx"
        if not path.exists():
            model = build_model(self.net(name), self.tensors(name), MEAN, contract, source)
            self.files.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            new.write_bytes(model.SerializeToString(deterministic=True))
            new.replace(path)
        return path

    def session(self, name: str, precision: Precision = "fp32", canvas: Canvas = "ragged") -> Session:
        """Open a net as `validate` does."""
        requested = precision if self.on_gpu else None  # a CPU computes a file in one precision only
        return open_with_placement(
            self.model_file(name, precision, canvas), Placement(self.device, requested), preallocate=self.on_gpu
        )

    def flop(self, name: str, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the floating-point operations of images of these sizes: two per multiply-add."""
        net = self.net(name)
        counts = {size: multiply_adds(net, *size, self.classes) for size in set(sizes)}
        return 2 * sum(counts[size] for size in sizes)

    def rates(self, images: int, flop: float, seconds: float, precision: str) -> dict[str, Any]:
        """Return images per second, TFLOP/s and their share of the peak, 0 to 1. flop: of all images together."""
        tflops, peak = flop / seconds / 1e12, self.peaks.get(precision)
        share = round(tflops / peak, 4) if peak else None
        return {"images_per_second": images / seconds, "tflops": tflops, "share_of_peak": share}

    def wait(self) -> None:
        """Wait until the GPU has finished all of torch's work."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], Any], *, seconds: float = 0.6, min_calls: int = 3, warm: int = 2) -> Timing:
        """Repeat a call for about `seconds`, at least `min_calls` times; return the milliseconds of one call."""
        for _ in range(self.reduced(warm, 1)):
            call()
        self.wait()
        took: list[float] = []
        begun = time.perf_counter()
        while len(took) < self.reduced(min_calls) or (time.perf_counter() - begun < seconds and not self.tiny):
            start = time.perf_counter()
            call()
            self.wait()
            took.append(1e3 * (time.perf_counter() - start))
        spread = {"ms_min": min(took), "ms_mean": statistics.mean(took), "ms_max": max(took)}
        return {"ms": statistics.median(took), **spread, "calls": len(took)}

    def used_memory_gb(self) -> float | None:
        """Return the used memory of the GPU in GB, by all processes; None on a CPU."""
        if not self.on_gpu:
            return None
        free, total = torch.cuda.mem_get_info()
        return round((total - free) / 1e9, 2)

    def free(self) -> None:
        """Return torch's unused memory to the GPU: onnxruntime and other processes size themselves by what is free."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def measure_peaks(self) -> dict[str, float]:
        """Measure 8192x8192 matrix products in torch; return TFLOP/s by precision.

        The numbers are random, as in nets: zeros would run 10 % faster, since the chip then draws less power.
        """
        side = 256 if self.tiny or not self.on_gpu else PEAK_SIDE
        kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
        peaks = {}
        for name, dtype in kinds.items():
            one, other = (torch.randn(side, side, device=self.device).to(dtype) for _ in range(2))
            with tf32(name == "tf32"):
                timing = self.timed(partial(torch.matmul, one, other), seconds=0.5, min_calls=5, warm=5)
            peaks[name] = significant(2 * side**3 / timing["ms"] / 1e9)
        self.peaks = peaks
        self.free()
        return peaks
