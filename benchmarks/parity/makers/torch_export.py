"""Random nets in torch whose scores tell images apart, and their ONNX files."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks.parity.makers.net import SPREAD, Array, Run, softmax


def discriminating(net: nn.Module, inputs: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give a net random weights with which its logits differ between inputs, (N, 3, rows, columns).

    As initialized, many nets answer the same to everything. Weights are drawn for a constant variance, batch
    normalization takes the inputs' statistics, and the last layer is scaled by class.
    """
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                fan_in = parameter[0].numel() if parameter.dim() in {2, 4} else parameter.shape[-1]
                parameter.normal_(0, (2 / fan_in) ** 0.5 if parameter.dim() == 4 else fan_in**-0.5)
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_running_stats()
                module.momentum = None
                module.train()
        logits(inputs)
        net.eval()
        last = [module for module in net.modules() if isinstance(module, nn.Linear) and module.out_features > 1][-1]
        answers = logits(inputs)
        factor = SPREAD / answers.std(0)
        last.weight *= factor[:, None]
        last.bias.copy_((last.bias - answers.mean(0)) * factor)


class Logits(nn.Module):
    """A net of transformers, which returns an object, as one that returns logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(pixel_values=pixel_values).logits
        return logits


def export(net: nn.Module, example: torch.Tensor, file: Path, *, fixed_batch: bool = False) -> None:
    """Write a net's ONNX file. example: (1, channels, rows, columns); fixed_batch: for nets that allow no other."""
    batch, shapes = (example, None) if fixed_batch else (torch.cat([example] * 2), ({0: torch.export.Dim("batch")},))
    torch.onnx.export(
        net.eval(), (batch,), file, input_names=["pixel_values"], output_names=["logits"], dynamo=True,
        dynamic_shapes=shapes, external_data=False, verbose=False,
    )  # fmt: skip


def runner(net: nn.Module, read: Callable[[Path], torch.Tensor]) -> Run:
    """Return what runs a net of logits on an image file; read: the maker's preprocessing, (1, channels, r, c)."""

    def run(image: Path) -> tuple[Array, Array]:
        values = read(image)
        with torch.no_grad():
            return values.numpy(), softmax(net(values)[0].numpy())

    return run


def stacked(read: Callable[[Path], torch.Tensor], images: Sequence[Path]) -> torch.Tensor:
    """Return the inputs for all images, (N, channels, rows, columns)."""
    return torch.cat([read(image) for image in images])
