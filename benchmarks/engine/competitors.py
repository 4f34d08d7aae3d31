"""The competitors: each is a function from a decoded image to its scores.

All receive uint8 pixels, include the work of `make_views` (resizing once per scale, mirroring), run the plain and the
mirrored view of a scale as one batch, use the same number of threads, and average alike. Only competitors that need
torch import it, so that it does not count as memory of the others.
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.arrays import Float64Array, UInt8Array
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.runtimes import Device
from prelunet.evaluator.engine.runtimes import openvino as openvino_runtime
from prelunet.evaluator.engine.runtimes.onnx import import_runtime
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.imaging.views import ViewImage, make_views
from prelunet.evaluator.machine import supports_bf16
from prelunet.evaluator.protocols import EvaluationProtocol

if TYPE_CHECKING:
    from benchmarks.common.dense_torch import DenseNet

CompetitorPrecision = Literal["fp32", "bf16", "int8"]
Scores = npt.NDArray[np.floating[Any]]
ScoreFunction = Callable[[UInt8Array, EvaluationProtocol], Scores]

# Tolerated deviation of a competitor's scores from those of torch eager, relative to the largest score, since an
# untrained net has only small scores. On models A and C float32 in another order gave 1e-5, and bf16, which keeps
# 8 bits, 4e-2; a wrong head is off by about 1. int8 depends on the net: this one is not trained, and calibrated on one
# picture.
TOLERANCES: Mapping[CompetitorPrecision, float] = {"fp32": 1e-4, "bf16": 0.1, "int8": 0.6}


class NotAvailable(Exception):  # noqa: N818 - not an error: it becomes a row of the table
    """This environment or machine cannot run a competitor; the text states the reason."""


@dataclass
class BenchmarkNet:
    """The files of one net in `folder` (`nets.write_files`), and what competitors share in memory.

    threads: of every competitor; sessions: open ones on our file.
    """

    folder: Path
    threads: int
    sessions: dict[tuple[str, Device, CompetitorPrecision], Session] = field(default_factory=dict)

    @cached_property
    def net(self) -> "DenseNet":
        """Return the torch net in float32, channels first: naive, eager and torch.compile share it."""
        return self.dense_net()

    def dense_net(self, *, precision: CompetitorPrecision = "fp32", channels_last: bool = False) -> "DenseNet":
        """Load the torch net."""
        import torch

        from benchmarks.common.dense_torch import DenseNet
        from prelunet.training.net.checkpoints import read_checkpoint
        from prelunet.training.net.network import network_from_checkpoint

        torch.set_num_threads(self.threads)
        checkpoint = read_checkpoint(self.folder / "net.safetensors")
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        onednn = precision == "fp32" and _has_onednn()
        net = network_from_checkpoint(checkpoint)
        return DenseNet(net, checkpoint.mean, dtype=dtype, channels_last=channels_last, onednn=onednn)


@dataclass(frozen=True)
class OpenedCompetitor:
    """A competitor that is ready to run.

    settings: its settings, reported by itself where possible; sample: for a competitor that is too slow for whole
    images, a function of image, protocol and number of crops that returns the seconds for all crops of the image.
    """

    answer: ScoreFunction
    settings: Mapping[str, Any]
    sample: Callable[[UInt8Array, EvaluationProtocol, int], float] | None = None


@dataclass(frozen=True)
class Competitor:
    """One way to compute the scores.

    ours: whether it is this project's; open: raises NotAvailable; alone_as: another competitor with equal memory and
    start time, because it is the same net in the same runtime.
    """

    name: str
    precision: CompetitorPrecision
    open: Callable[[BenchmarkNet], OpenedCompetitor]
    ours: bool = False
    alone_as: str | None = None


def in_pairs(run: Callable[[UInt8Array], Scores]) -> ScoreFunction:
    """Build a score function from a batch function, uint8 (N, H, W, 3) to scores (N, K); each scale is one batch."""

    def answer(image: UInt8Array, protocol: EvaluationProtocol) -> Scores:
        assert protocol.kind == "dense", f"the competitors support only dense protocols, not {protocol.kind}"
        views = make_views(image, protocol)
        batches = [np.stack([v.image for v in views if v.view.scale == scale]) for scale in protocol.scales]
        scores: Scores = np.mean([run(batch).mean(axis=0, dtype=np.float64) for batch in batches], axis=0)
        return scores

    return answer


# The naive competitor crops every window out of the resized image and classifies the crops, in torch float32. Its
# scores differ from dense ones by nature: at its border a crop sees zeros where a window sees its neighbors.

CROPS_AT_ONCE = 16
Corner = tuple[int, int, int]  # index of the view, row and column of the crop's upper left pixel


def _naive(case: BenchmarkNet) -> OpenedCompetitor:
    net = case.net

    def answer(image: UInt8Array, protocol: EvaluationProtocol) -> Scores:  # crops → view → image, each a plain mean
        views = make_views(image, protocol)
        corners = _corners(net, views)
        scores = _classify(net, views, corners)
        owner = np.array([index for index, _, _ in corners])
        means: Scores = np.mean([scores[owner == index].mean(axis=0) for index in range(len(views))], axis=0)
        return means

    def seconds_of_sample(image: UInt8Array, protocol: EvaluationProtocol, crops: int) -> float:
        start = time.perf_counter()
        views = make_views(image, protocol)
        corners = _corners(net, views)
        begun = time.perf_counter()
        chosen = np.random.default_rng(0).choice(len(corners), min(crops, len(corners)), replace=False)
        _classify(net, views, [corners[index] for index in sorted(chosen)])
        return begun - start + (time.perf_counter() - begun) * len(corners) / len(chosen)

    settings = {**_torch_settings(), "crops at once": CROPS_AT_ONCE}
    return OpenedCompetitor(answer, settings, seconds_of_sample)


def _corners(net: "DenseNet", views: Sequence[ViewImage]) -> list[Corner]:
    """Return the corner of each window's crop: spaced by the trunk's stride, the last ones moved inside the image."""
    crop, stride = net.architecture.crop, net.architecture.trunk_stride
    corners = []
    for index, view in enumerate(views):
        sides = view.image.shape[:2]
        counts = [net.architecture.feature_map_side(side) - net.architecture.window + 1 for side in sides]
        tops, lefts = (
            [min(stride * i, side - crop) for i in range(count)] for side, count in zip(sides, counts, strict=True)
        )
        corners += [(index, top, left) for top in tops for left in lefts]
    return corners


def _classify(net: "DenseNet", views: Sequence[ViewImage], corners: Sequence[Corner]) -> Float64Array:
    crop, scores = net.architecture.crop, []
    for start in range(0, len(corners), CROPS_AT_ONCE):
        some = corners[start : start + CROPS_AT_ONCE]
        batch = np.stack([views[i].image[top : top + crop, left : left + crop] for i, top, left in some])
        scores.append(net.scores(batch))
    return np.concatenate(scores).astype(np.float64)


def _eager(case: BenchmarkNet) -> OpenedCompetitor:
    return OpenedCompetitor(in_pairs(case.net.scores), _torch_settings())


def _compiled(case: BenchmarkNet) -> OpenedCompetitor:
    import torch

    # Sizes vary between images. Freezing converts weights to oneDNN's layout once, also in float32.
    options: dict[str, Any] = {"freezing": True}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(case.folder / "inductor")  # so that nothing compiled earlier is reused
    case.net.keep_from_compiler()
    net = torch.compile(case.net, dynamic=True, options=options)

    def run(images: UInt8Array) -> Scores:
        with torch.inference_mode():
            scores: Scores = net(torch.from_numpy(images)).numpy()
            return scores

    side = case.net.architecture.crop
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(np.zeros((2, side + 40, side + 70, 3), np.uint8))
    except RuntimeError as error:  # mostly a missing C++ compiler
        raise NotAvailable(f"torch.compile: {str(error).strip().splitlines()[0]}") from error
    facts = {"dynamic": True, **options, "compiled": "all but the gathering of bins and the three products"}
    return OpenedCompetitor(in_pairs(run), {**_torch_settings(), **facts})


def _channels_last(case: BenchmarkNet, precision: CompetitorPrecision) -> OpenedCompetitor:
    if precision == "bf16" and not supports_bf16():
        raise NotAvailable("this CPU has no bfloat16 instructions, and torch's emulation is ten times slower")
    net = case.dense_net(precision=precision, channels_last=True)
    return OpenedCompetitor(in_pairs(net.scores), {**_torch_settings(), "layout": "channels_last"})


def _has_onednn() -> bool:
    import torch

    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _torch_settings() -> dict[str, Any]:
    import torch

    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "head": "gathered bins, three products",
        "convolutions and products": "oneDNN" if _has_onednn() else "ATen, BLAS",
        "layout": "channels first",
    }


def _onnxruntime(case: BenchmarkNet, file: str = "plain.onnx") -> OpenedCompetitor:
    try:
        runtime = import_runtime()
    except EnvironmentFault as error:
        raise NotAvailable(str(error)) from error
    options = runtime.SessionOptions()
    options.intra_op_num_threads = case.threads
    session = runtime.InferenceSession(os.fspath(case.folder / file), options, providers=["CPUExecutionProvider"])
    run = in_pairs(lambda images: session.run(None, {"images": _channels_first(images)})[0])
    return OpenedCompetitor(
        run,
        {
            "onnxruntime": runtime.__version__,
            "threads": case.threads,
            "providers": session.get_providers(),
            "graph optimization": str(options.graph_optimization_level).rpartition(".")[2],
            "file": file,
        },
    )


def _openvino(case: BenchmarkNet, precision: CompetitorPrecision) -> OpenedCompetitor:
    """Open the plain export in OpenVINO."""
    try:
        import openvino
    except ImportError as error:
        raise NotAvailable(f"openvino cannot be imported ({error})") from error
    requested = {
        "INFERENCE_PRECISION_HINT": openvino_runtime.HINTS[precision],
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": case.threads,
    }
    try:
        openvino_runtime.check_processor(precision)
        compiled = openvino.Core().compile_model(case.folder / "plain.onnx", "CPU", requested)
        openvino_runtime.check_precision(compiled, precision)
    except EnvironmentFault as error:
        raise NotAvailable(str(error)) from error
    request = compiled.create_infer_request()

    def run(images: UInt8Array) -> Scores:
        scores: Scores = request.infer({"images": _channels_first(images)}, share_inputs=True)["scores"].copy()
        return scores

    reported = {key: str(compiled.get_property(key)) for key in (*requested, "NUM_STREAMS", "ENABLE_CPU_PINNING")}
    facts = {"openvino": openvino.__version__, "file": "plain export", "convolutions": precision}
    return OpenedCompetitor(in_pairs(run), {**facts, **reported})


def _bare(case: BenchmarkNet, device: Device, precision: CompetitorPrecision, file: str = "ours") -> OpenedCompetitor:
    """Call the runtime on our file once per scale, without the work of `_ours` around it."""
    session, settings = _session(case, device, precision, file)

    def run(images: UInt8Array) -> Scores:
        return session.run(images, np.array([images.shape[1:3]] * len(images), np.int64)).scores

    return OpenedCompetitor(in_pairs(run), settings)


def _ours(case: BenchmarkNet, device: Device, precision: CompetitorPrecision, file: str = "ours") -> OpenedCompetitor:
    """Work as `prelunet classify`: views, batches, canvases, averages."""
    session, settings = _session(case, device, precision, file)
    return OpenedCompetitor(lambda image, protocol: classify_images(session, [image], protocol)[0].scores, settings)


def _session(
    case: BenchmarkNet, device: Device, precision: CompetitorPrecision, file: str = "ours"
) -> tuple[Session, dict[str, Any]]:
    """Return the session on our file; two competitors share it, since each session takes 2.6 GB for model C."""
    key = file, device, precision
    if key not in case.sessions:
        path = case.folder / f"{file}.onnx"
        try:
            case.sessions[key] = open_session(path, device, precision=precision, threads=case.threads)
        except EnvironmentFault as error:
            raise NotAvailable(str(error)) from error
    session = case.sessions[key]
    facts = {"threads": case.threads, "rules": session.rules.to_json(), "file": file}
    return session, {**session.circumstances.to_json(), **facts}


def _channels_first(images: UInt8Array) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2), np.float32)


def matrix_product_rates(threads: int) -> dict[CompetitorPrecision, float]:
    """Return GFLOP/s of a product of random matrices, the fastest of ten: the bound of every competitor of a precision.

    oneDNN's product in torch, because MKL's takes twice as long in float32 on CPUs other than Intel's; bf16 only where
    this CPU has instructions for it.
    """
    import torch

    torch.set_num_threads(threads)
    product = torch.ops.mkldnn._linear_pointwise if _has_onednn() else None
    rates: dict[CompetitorPrecision, float] = {}
    dtypes: dict[CompetitorPrecision, torch.dtype] = {"fp32": torch.float32}
    if supports_bf16():
        dtypes["bf16"] = torch.bfloat16
    for precision, dtype in dtypes.items():
        one, other = (torch.randn(PEAK_SIDE, PEAK_SIDE).to(dtype) for _ in range(2))
        took = []
        for _ in range(10):
            begun = time.perf_counter()
            product(one, other, None, "none", [], "") if product else torch.matmul(one, other)
            took.append(time.perf_counter() - begun)
        rates[precision] = round(2 * PEAK_SIDE**3 / min(took) / 1e9, 1)
    return rates


PEAK_SIDE = 2048  # of the matrices whose product is the bound
BEFORE = "ours before, openvino bf16"  # the file of another checkout (--before) in this engine
REFERENCE = "torch eager"  # reference of all scores; a test compares it with training.net.dense_reference
COMPETITORS: Mapping[str, Competitor] = {
    competitor.name: competitor
    for competitor in (
        Competitor("naive", "fp32", _naive, alone_as=REFERENCE),
        Competitor(REFERENCE, "fp32", _eager),
        Competitor("torch.compile", "fp32", _compiled),
        Competitor("torch channels_last", "fp32", partial(_channels_last, precision="fp32")),
        Competitor("onnxruntime, plain export", "fp32", _onnxruntime),
        Competitor("openvino, plain export", "fp32", partial(_openvino, precision="fp32")),
        Competitor(
            "openvino, our file", "fp32", partial(_bare, device="openvino", precision="fp32"), alone_as="ours, openvino"
        ),
        Competitor("ours, cpu", "fp32", partial(_ours, device="cpu", precision="fp32"), ours=True),
        Competitor("ours, openvino", "fp32", partial(_ours, device="openvino", precision="fp32"), ours=True),
        Competitor("ours, ncnn", "fp32", partial(_ours, device="ncnn", precision="fp32"), ours=True),
        Competitor("torch channels_last bf16", "bf16", partial(_channels_last, precision="bf16")),
        Competitor("openvino, plain export, bf16", "bf16", partial(_openvino, precision="bf16")),
        Competitor(
            "openvino, our file, bf16",
            "bf16",
            partial(_bare, device="openvino", precision="bf16"),
            alone_as="ours, openvino bf16",
        ),
        Competitor(
            BEFORE,
            "bf16",
            partial(_ours, device="openvino", precision="bf16", file="before"),
            alone_as="ours, openvino bf16",
        ),
        Competitor("ours, openvino bf16", "bf16", partial(_ours, device="openvino", precision="bf16"), ours=True),
        Competitor("onnxruntime, plain export, int8", "int8", partial(_onnxruntime, file="plain-int8.onnx")),
        Competitor(
            "openvino, our file, int8",
            "int8",
            partial(_bare, device="openvino", precision="int8", file="int8"),
            alone_as="ours, openvino int8",
        ),
        Competitor(
            "ours, openvino int8", "int8", partial(_ours, device="openvino", precision="int8", file="int8"), ours=True
        ),
    )
}
