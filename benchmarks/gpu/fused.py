"""Part `fused`: the trunk alone in onnxruntime, in torch, and as cuDNN graphs, which compute PReLU in the convolution.

It decides whether a second engine on GPUs is worth having. All have the same weights, canvases and pixels, which are on
the device already, in half precision with channels last. `masked` multiplies the input of every padded convolution by
a mask, as our ragged files do; the masks hold ones here. `compiled` is torch.compile, which can compute bias, PReLU and
mask in one kernel. `cudnn` needs the package nvidia-cudnn-frontend; one graph for each convolution computes
relu(z) + a·(z − relu(z)) of its sum z and slope a.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import onnx
import torch
from onnx.utils import Extractor
from torch import Tensor, nn

from benchmarks.common.dense_torch import DenseNet
from benchmarks.common.nets import MEAN
from benchmarks.common.rig import Rig, tf32
from benchmarks.common.runner import Case
from benchmarks.gpu.device import noise_batch, raw_session
from prelunet.evaluator.architectures import Conv, multiply_adds
from prelunet.evaluator.contract import INPUTS
from prelunet.evaluator.engine.runtimes.onnx import import_runtime

NET = "A"
CANVAS = (8, 384, 512)  # images, height, width
WAYS = (
    ("onnxruntime", False), ("onnxruntime", True), ("eager", False), ("eager", True), ("cudnn", False),
    ("compiled", False), ("compiled", True),
)  # fmt: skip
PLAN = (
    f"{len(WAYS)} trunks of {NET} on one canvas: onnxruntime, eager and compiled torch, each with and without masks",
    "and cuDNN graphs with PReLU; about 2 minutes, mostly for the compiler",
)

Settings = dict[str, Any]


def cases(rig: Rig) -> Iterator[Case]:
    """Yield the cases, those that compile last."""
    for way, masked in WAYS:
        settings: Settings = {"what": "fused", "net": NET, "way": way, "masked": masked, "canvas": list(CANVAS)}
        yield Case(settings, partial(_measure, rig, settings), 50 if way == "compiled" else 10)


def _measure(rig: Rig, settings: Settings) -> dict[str, Any]:
    """Time one trunk. off: deviation from torch in float32 without TF32, relative to the largest value."""
    rows, height, width = settings["canvas"]
    shape = rows, height, width = rig.reduced(rows), rig.px(height), rig.px(width)
    images = torch.from_numpy(noise_batch(*shape)[0]).to(rig.device)
    with torch.inference_mode():
        with tf32(allowed=False):
            exact = Trunk(DenseNet(rig.torch_net(settings["net"]), MEAN)).to(rig.device)(images, ())
        if settings["way"] == "onnxruntime":
            call = _onnxruntime(rig, settings, shape)
        else:
            try:
                call = _torch(rig, settings, images)
            except ImportError as error:
                return {"not_available": str(error)}
        found = call().float().to(rig.device)
        timing = rig.timed(call)
    net, (fc1, fc2) = rig.net(settings["net"]), rig.net(settings["net"]).widths
    windows = (exact.shape[2] - net.window + 1) * (exact.shape[3] - net.window + 1)
    head = windows * (net.bins * net.channels * fc1 + fc1 * fc2 + fc2 * rig.classes)
    flop = 2 * rows * (multiply_adds(net, height, width, rig.classes) - head)
    return {
        **timing,
        **rig.rates(rows, flop, timing["ms"] / 1e3, "fp16"),
        "off": float((found - exact).abs().max() / exact.abs().max()),
        "memory_gb": rig.used_memory_gb(),
    }


class Trunk(nn.Module):
    """The trunk of a net, from uint8 (N, H, W, 3) to the feature map (N, C, rows, columns)."""

    def __init__(self, net: DenseNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, masks: Sequence[Tensor]) -> Tensor:
        """Return the feature map. masks: (1, 1, rows, columns) for each padded convolution but the first, or none."""
        values, place = self.centered(images), 0
        for index, layer in enumerate(self.net.trunk):
            if masks and _is_masked(index, layer):
                values, place = values * masks[place], place + 1
            values = layer(values)
        return values

    def centered(self, images: Tensor) -> Tensor:
        """Return the input of the first layer."""
        pixels = images.permute(0, 3, 1, 2) - self.net.mean
        return pixels.to(self.net.dtype).contiguous(memory_format=self.net.layout)

    def ones(self, images: Tensor) -> list[Tensor]:
        """Return masks that hold ones."""
        masks, values = [], self.centered(images)
        for index, layer in enumerate(self.net.trunk):
            if _is_masked(index, layer):
                masks.append(torch.ones_like(values[:1, :1]))
            values = layer(values)
        return masks


def _is_masked(index: int, layer: nn.Module) -> bool:
    return index > 0 and isinstance(layer, nn.Conv2d) and layer.padding != (0, 0)


def _torch(rig: Rig, settings: Settings, images: Tensor) -> Callable[[], Tensor]:
    """Return a run of the trunk in torch."""
    net = DenseNet(rig.torch_net(settings["net"]), MEAN, dtype=torch.float16, channels_last=True)
    trunk = Trunk(net).to(rig.device)
    masks = trunk.ones(images) if settings["masked"] else []
    if settings["way"] == "cudnn":
        net.trunk = nn.Sequential(*_with_cudnn(net.trunk, trunk.centered(images)))
    elif settings["way"] == "compiled":
        torch._dynamo.reset()
        # A rehearsal compiles nothing, as that takes a minute.
        return partial(torch.compile(trunk, backend="inductor" if rig.on_gpu else "eager"), images, masks)
    return partial(trunk, images, masks)


def _onnxruntime(rig: Rig, settings: Settings, shape: tuple[int, int, int]) -> Callable[[], Tensor]:
    """Return a run of the trunk of our file, cut out of it; its result stays on the device until it is read."""
    path = rig.model_file(settings["net"], "fp16", "ragged" if settings["masked"] else "exact")
    model, last = onnx.load(str(path)), rig.net(settings["net"]).trunk[-1]
    output = f"{last.name}.activation" if isinstance(last, Conv) else last.name
    cut = path.with_name(f"{path.stem}-trunk.onnx")
    onnx.save(Extractor(model).extract_model(list(INPUTS), [output]), str(cut))
    session = raw_session(rig, cut)
    binding, taken = session.io_binding(), {value.name for value in session.get_inputs()}
    for name, array in zip(INPUTS, noise_batch(*shape), strict=True):
        if name in taken:
            binding.bind_ortvalue_input(name, import_runtime().OrtValue.ortvalue_from_numpy(array, rig.device, 0))
    binding.bind_output(output, rig.device, 0)

    class Result:
        def float(self) -> Tensor:
            return torch.from_numpy(binding.get_outputs()[0].numpy()).float()

    def call() -> Any:
        session.run_with_iobinding(binding)
        return Result()

    return call


def _with_cudnn(trunk: nn.Sequential, values: Tensor) -> Iterator[nn.Module]:
    """Yield the layers, with each convolution and its activation as one graph. values: the input of the first layer."""
    layers = iter(trunk)
    for layer in layers:
        one = CudnnLayer(layer, next(layers), values) if isinstance(layer, nn.Conv2d) else layer
        values = one(values)
        yield one


class CudnnLayer(nn.Module):
    """A convolution with bias and PReLU as one cuDNN graph, for inputs of one shape."""

    def __init__(self, convolution: Any, prelu: Any, values: Tensor) -> None:
        import cudnn  # of nvidia-cudnn-frontend

        super().__init__()
        half, single = cudnn.data_type.HALF, cudnn.data_type.FLOAT
        self.graph = graph = cudnn.pygraph(io_data_type=half, intermediate_data_type=single, compute_data_type=single)
        per_channel = (value.detach().reshape(1, -1, 1, 1) for value in (convolution.bias, prelu.slope))
        self.tensors: list[Any] = [convolution.weight.detach(), *per_channel]
        image, weight, bias, slopes = (graph.tensor_like(value) for value in (values, *self.tensors))
        padding, stride = list(convolution.padding), list(convolution.stride)
        product = graph.conv_fprop(image=image, weight=weight, padding=padding, stride=stride, dilation=[1, 1])
        total = graph.bias(input=product, bias=bias)
        positive = graph.relu(input=total)
        output = graph.add(a=positive, b=graph.mul(a=slopes, b=graph.sub(a=total, b=positive)))
        output.set_output(True)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.names = [image, weight, bias, slopes, output]
        self.workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=values.device)
        self.result: Tensor = convolution(values)  # its shape and layout

    def forward(self, values: Tensor) -> Tensor:
        """Return the activations, in memory that the next call reuses."""
        self.graph.execute(dict(zip(self.names, [values, *self.tensors, self.result], strict=True)), self.workspace)
        return self.result
