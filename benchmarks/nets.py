"""The nets of the benchmarks: a checkpoint whose scores tell mistakes, and its files for every competitor."""

from pathlib import Path

import numpy as np
import torch

from dense_torch import DenseNet, export_plain
from evaluator.contract import ClassEntry, golden_image
from export.exporting import export_checkpoint
from training.architectures import architecture
from training.checkpoints import Checkpoint, write_checkpoint
from training.dense import subtract_mean
from training.initialization import CHANNEL_MEAN, initial_tensors
from training.network import PreluNet, load_tensors, network_from_checkpoint

CLASSES = 1000
SPREAD = 3.0  # standard deviation of the logits of one crop


def write_files(name: str, folder: Path) -> None:
    """Write an architecture's checkpoint, plain export and model file: `net.safetensors`, `plain.onnx`, `ours.onnx`."""
    checkpoint = telling_checkpoint(name)
    write_checkpoint(folder / "net.safetensors", checkpoint)
    export_plain(DenseNet(network_from_checkpoint(checkpoint), checkpoint.mean), folder / "plain.onnx")
    del checkpoint  # exporting reads it anew, and model C has 1.3 GB
    export_checkpoint(folder / "net.safetensors", folder / "ours.onnx")


def telling_checkpoint(name: str, classes: int = CLASSES, seed: int = 0) -> Checkpoint:
    """Make a net with random weights that does not say the same of every image.

    Weights do not change the speed, but an untrained net gives every class 1/K, and forgives a wrong bias or slope.
    This one has biases up to ±0.5, slopes from 0 to 0.5, and logits of standard deviation 3 on a golden image.
    """
    net, rng = architecture(name), np.random.default_rng(seed)
    tensors = initial_tensors(net, classes, seed)
    for key, tensor in tensors.items():
        if key.endswith((".bias", ".slope")):
            low, high = (-0.5, 0.5) if key.endswith(".bias") else (0, 0.5)
            tensors[key] = rng.uniform(low, high, tensor.shape).astype(np.float32)
    mean = np.array(CHANNEL_MEAN, np.float32)
    torch_net = PreluNet(net, classes)
    load_tensors(torch_net.eval(), tensors)
    with torch.inference_mode():
        crop = torch.from_numpy(golden_image(net.crop, net.crop))[None]
        logits = torch_net(subtract_mean(crop, mean)) - torch.from_numpy(tensors["fc3.bias"])
    tensors["fc3.weight"] *= np.float32(SPREAD / logits.std().item())
    entries = tuple(ClassEntry(f"n{index:08d}", f"class {index}") for index in range(classes))
    return Checkpoint(net, entries, mean, tensors)
