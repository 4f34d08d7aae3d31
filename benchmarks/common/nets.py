"""The nets of the benchmarks: random weights whose scores reveal errors, and their files for every competitor."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common.dense_torch import DenseNet, export_plain
from prelunet.evaluator.architectures import Architecture, architecture
from prelunet.evaluator.contract import ClassEntry, golden_image
from prelunet.training.net.checkpoints import Checkpoint, write_checkpoint
from prelunet.training.net.dense_reference import subtract_mean
from prelunet.training.net.initialization import CHANNEL_MEAN, initial_tensors
from prelunet.training.net.network import PreluNet, load_tensors, network_from_checkpoint

CLASSES = 1000
MEAN = np.array(CHANNEL_MEAN, np.float32)
SPREAD = 3.0  # standard deviation of the logits of one crop


def write_files(name: str, folder: Path) -> None:
    """Write an architecture's checkpoint, plain export and model file: `net.safetensors`, `plain.onnx`, `ours.onnx`."""
    from prelunet.export.dense.export import export_checkpoint

    net = architecture(name)
    checkpoint = Checkpoint(net, class_entries(CLASSES), MEAN, discriminating_tensors(net, CLASSES))
    write_checkpoint(folder / "net.safetensors", checkpoint)
    export_plain(DenseNet(network_from_checkpoint(checkpoint), checkpoint.mean), folder / "plain.onnx")
    del checkpoint  # exporting reads it again, and model C has 1.3 GB
    export_checkpoint(folder / "net.safetensors", folder / "ours.onnx")


def class_entries(classes: int) -> tuple[ClassEntry, ...]:
    """Return `classes` class entries."""
    return tuple(ClassEntry(f"n{index:08d}", f"class {index}") for index in range(classes))


def discriminating_tensors(net: Architecture, classes: int, seed: int = 0) -> Mapping[str, npt.NDArray[np.float32]]:
    """Draw the parameters of a net whose scores differ between images.

    The weights do not affect the speed, but an untrained net gives every class 1/K, which hides a wrong bias or slope.
    This one has biases up to ±0.5, slopes from 0 to 0.5, and logits of standard deviation 3 on a golden image.
    """
    rng = np.random.default_rng(seed)
    tensors = initial_tensors(net, classes, seed)
    for key, tensor in tensors.items():
        if key.endswith((".bias", ".slope")):
            low, high = (-0.5, 0.5) if key.endswith(".bias") else (0, 0.5)
            tensors[key] = rng.uniform(low, high, tensor.shape).astype(np.float32)
    torch_net = PreluNet(net, classes)
    load_tensors(torch_net.eval(), tensors)
    with torch.inference_mode():
        crop = torch.from_numpy(golden_image(net.crop, net.crop))[None]
        logits = torch_net(subtract_mean(crop, MEAN)) - torch.from_numpy(tensors["fc3.bias"])
    tensors["fc3.weight"] *= np.float32(SPREAD / logits.std().item())
    return tensors
