"""Random architectures: read from TOML, trained two steps, exported, compared with the oracle."""

import json
import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prelunet.evaluator.architectures import ACTIVATIONS, Activation, Architecture, architecture
from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import ClassEntry, ModelContract
from prelunet.evaluator.engine.batching import plan_batches
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.memory import WORKSPACE_BYTES, batch_bytes, estimate_memory, gpu_rules
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.engine.shape_buckets import build_shape_buckets
from prelunet.evaluator.engine.verify import garbage_canvas
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.protocols import build_protocol
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.data.augmentation import dropout_factors
from prelunet.training.distributed.base import StepOptions
from prelunet.training.distributed.data_parallel import build_parallel
from prelunet.training.loop.trainer import SINGLE_PROCESS
from prelunet.training.net.architecture_file import read_architecture
from prelunet.training.net.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from prelunet.training.net.dense_reference import subtract_mean
from prelunet.training.net.initialization import Initialization, initial_tensors
from prelunet.training.net.network import PreluNet, load_tensors, parameter_groups, tensors_of
from tests.helpers import reference
from tests.helpers.discriminating_nets import CHANNEL_MEAN, noise
from tests.helpers.graph_memory import most_alive
from tests.training.training_folders import make_dataset

GROUPS, NETS = (10, 20) if os.environ.get("LARGE") else (6, 10)
CLASSES = ("big-cat", "dog", "ox")


def random_table(rng: np.random.Generator) -> dict[str, Any]:
    """Return the content of an architecture's file, with the smallest crop that its pyramid allows, or a larger one."""
    while True:
        trunk: list[dict[str, int]] = []
        for _ in range(rng.integers(1, 7)):
            kernel, stride = int(rng.integers(1, 8)), int(rng.choice([1, 1, 2, 3]))
            if rng.random() < 0.3:
                trunk.append({"pool": min(kernel, 4), "stride": stride})
            else:
                layer = {"conv": int(rng.integers(1, 7)), "kernel": kernel, "stride": stride}
                trunk.append({**layer, "pad": int(rng.integers(0, kernel)), "repeat": int(rng.choice([1, 1, 2]))})
        levels = rng.choice([1, 2, 3, 4, 5], rng.integers(1, 4), replace=False).tolist()
        fits = [crop for crop in range(1, 49) if smallest_window(trunk, crop) >= max(levels)]
        if fits and any("conv" in layer for layer in trunk):
            crop = fits[min(int(rng.integers(0, 5)), len(fits) - 1)]
            hidden = rng.integers(1, 9, 2).tolist()
            return {"crop": crop, "spp_levels": levels, "hidden": hidden if rng.random() < 0.5 else 6, "trunk": trunk}


def smallest_window(trunk: list[dict[str, int]], side: int) -> int:
    """Return the side of the last feature map, 0 if a map before it vanishes; counts the positions of each kernel."""
    for layer in trunk:
        for _ in range(layer.get("repeat", 1)):
            pad, kernel = layer.get("pad", 0), layer.get("kernel") or layer["pool"]
            side = len(range(-pad, side + pad - kernel + 1, layer["stride"]))
            if side == 0:
                return 0
    return side


def oracle_net(table: dict[str, Any]) -> reference.Net:
    """Return the net of a file for the oracle, with the names that docs/training.md promises."""
    trunk, stage = [], 1
    kinds = [layer for layer in table["trunk"] for _ in range(layer.get("repeat", 1))]
    for index, layer in enumerate(kinds):
        if "pool" in layer:
            trunk.append((f"pool{layer['pool']}", layer["stride"], 0))
            stage += 1
            continue
        before = 0
        while index - before > 0 and "conv" in kinds[index - before - 1]:
            before += 1
        is_last = index + 1 == len(kinds) or "pool" in kinds[index + 1]
        name = f"conv{stage}" if before == 0 and is_last else f"conv{stage}_{before + 1}"
        trunk.append((name, layer["stride"], layer["pad"]))
    return reference.Net(tuple(trunk), table["crop"], tuple(table["spp_levels"]))


def write_toml(path: Path, table: dict[str, Any]) -> Path:
    layers = [", ".join(f"{key} = {value}" for key, value in layer.items()) for layer in table["trunk"]]
    trunk = "".join(f"  {{ {layer} }},\n" for layer in layers)
    rest = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items() if key != "trunk")
    path.write_text(f"{rest}trunk = [\n{trunk}]\n")
    return path


def deviations(net: Architecture) -> tuple[float, float, float]:
    """Return standard deviations of fc1 to fc3 for which logits spread by about 3, so that a wrong bin shows."""
    features, (fc1, fc2) = net.bins * net.channels, net.widths
    return features**-0.5, fc1**-0.5, 0.03 * fc2**-0.5


def train_two_steps(net: Architecture, path: Path, rng: np.random.Generator) -> None:
    """Take two steps as the training loop does, on random images, and write the checkpoint."""
    torch_net = PreluNet(net, len(CLASSES))
    load_tensors(torch_net, initial_tensors(net, len(CLASSES), 3, Initialization(fc_stds=deviations(net))))
    parallel = build_parallel("ddp", torch_net, SINGLE_PROCESS, StepOptions())
    optimizer = torch.optim.SGD(parameter_groups(torch_net, 5e-4), lr=1e-5, momentum=0.9)
    for step in range(2):
        images = torch.from_numpy(rng.integers(0, 256, (4, net.crop, net.crop, 3), np.uint8))
        dropout = partial(dropout_factors, 0, step, widths=net.widths, rate=0.3)
        labels = torch.tensor([2, 0, 1, 2])
        assert np.isfinite(parallel.gradients(subtract_mean(images, CHANNEL_MEAN), labels, dropout, 4).loss)
        optimizer.step()
    classes = tuple(ClassEntry(name, name) for name in CLASSES)
    write_checkpoint(path, Checkpoint(net, classes, CHANNEL_MEAN, tensors_of(torch_net)))


def train_by_the_verb(file: Path, net: Architecture, data: Path, out: Path) -> None:
    keys = {
        "architecture": file,
        "activation": net.activation,
        "crop": net.crop,
        "scales": f"{net.crop},{net.crop + 9}",
        "batch": 4,
        "steps": 2,
        "rate": 1e-5,
        "fc-stds": ",".join(map(str, deviations(net))),
        "device": "cpu",
        "workers": 0,
    }
    options = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    assert run(["train", "--recipe", "demo", "--data", str(data), "--out", str(out), "--no-tensorboard", *options]) == 0


def sizes_of(crop: int, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """Yield three sizes that are not square."""
    for _ in range(3):
        height, more = crop + int(rng.integers(0, 12)), int(rng.integers(1, 25))
        yield (height, height + more) if rng.random() < 0.5 else (height + more, height)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("own"), classes=CLASSES)


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_architectures_equal_the_oracle_and_stay_within_their_memory(
    group: int, data: Path, tmp_path: Path
) -> None:
    for number in range(NETS):
        rng = np.random.default_rng((22, group, number))
        table = random_table(rng)
        file = write_toml(tmp_path / f"net{number}.toml", table)
        activation: Activation = ACTIVATIONS[int(rng.integers(len(ACTIVATIONS)))]
        net = architecture(read_architecture(file), activation=activation)
        path = tmp_path / f"net{number}.safetensors"
        if number == 0:
            train_by_the_verb(file, net, data, tmp_path / "run")
            (tmp_path / "run" / "last.safetensors").rename(path)
        else:
            train_two_steps(net, path, rng)
        check_net(path, oracle_net(table), rng)


def test_a_window_of_one_cell_after_a_padded_convolution_equals_the_oracle(tmp_path: Path) -> None:
    trunk = [
        {"conv": 4, "kernel": 5, "stride": 2, "pad": 0},
        {"pool": 2, "stride": 1},
        {"conv": 3, "kernel": 3, "stride": 1, "pad": 1},
    ]
    table = {"crop": 7, "spp_levels": [1], "hidden": 6, "trunk": trunk}
    net = read_architecture(write_toml(tmp_path / "net.toml", table))
    assert net.window == 1
    train_two_steps(net, tmp_path / "net.safetensors", np.random.default_rng(0))
    check_net(tmp_path / "net.safetensors", oracle_net(table), np.random.default_rng(1))


def test_a_net_whose_logits_cancel_is_exported(tmp_path: Path) -> None:
    table = {"crop": 13, "spp_levels": [4], "hidden": 40, "trunk": [{"conv": 6, "kernel": 7, "stride": 1, "pad": 3}]}
    net = read_architecture(write_toml(tmp_path / "net.toml", table))
    tensors = initial_tensors(net, len(CLASSES), 3, Initialization(fc_stds=deviations(net)))
    largest = np.abs(tensors["fc3.weight"]).max()
    tensors["fc3.weight"] = np.tile([largest, -largest], (len(CLASSES), 20)).astype(np.float32)
    tensors["fc2.weight"] = np.repeat(tensors["fc2.weight"][::2], 2, axis=0)  # pairs of equal units
    tensors["fc3.bias"] = np.array([1e-5, 3e-5, -2e-5], np.float32)
    path = tmp_path / "net.safetensors"
    write_checkpoint(path, Checkpoint(net, tuple(ClassEntry(name, name) for name in CLASSES), CHANNEL_MEAN, tensors))
    check_net(path, oracle_net(table), np.random.default_rng(1))


def check_net(path: Path, oracle: reference.Net, rng: np.random.Generator) -> None:
    """Export a checkpoint; compare ragged images on one canvas with the oracle, and memory with the bound."""
    checkpoint, model = read_checkpoint(path), path.with_suffix(".onnx")
    net = checkpoint.architecture
    export_checkpoint(path, model)
    session = open_session(model, "cpu")
    sizes = list(sizes_of(net.crop, rng))
    images = [noise(*size, seed=index) for index, size in enumerate(sizes)]
    outputs = session.run(*garbage_canvas(session.contract, images))
    for index, image in enumerate(images):
        answer = reference.evaluate(oracle, checkpoint.tensors, checkpoint.mean, image, net.activation)
        rows, columns = answer.window_scores.shape[:2]
        assert outputs.windows[index].tolist() == [rows, columns], net
        # Nets of at most twelve narrow layers: 1e-6 was measured.
        np.testing.assert_allclose(outputs.scores[index], answer.scores, rtol=0, atol=1e-5, err_msg=str(net))
        np.testing.assert_allclose(
            outputs.window_scores[index, :rows, :columns], answer.window_scores, rtol=0, atol=1e-5, err_msg=str(net)
        )
        # Where terms of 1 cancel to logits below 0.01, errors are relative to the terms.
        largest = max(np.abs(answer.logits).max(), 0.01)
        np.testing.assert_allclose(outputs.logits[index], answer.logits, rtol=0, atol=1e-4 * largest, err_msg=str(net))
    height, width = sizes[0]
    assert most_alive(model, height, width) <= needed(session.contract, 1, height, width) - WORKSPACE_BYTES, net
    check_plans(session)


def needed(contract: ModelContract, rows: int, height: int, width: int) -> int:
    windows = math.prod(contract.window_grid(height, width))
    return batch_bytes(contract, rows * height * width, rows * windows)


def check_plans(session: Session) -> None:
    """Check that batches for a CPU stay within the estimate, and that those for a GPU hold every image once."""
    contract = session.contract
    protocol = build_protocol("multi-scale", contract)
    images = [(100, 100), (100, 131), (400, 100)] * 70
    shapes = [resized_size(*image, scale, protocol.long_side_cap) for image in images for scale in protocol.scales]
    bound = estimate_memory(session, protocol, len(images), None).parts["batches"]
    for batch in plan_batches(shapes, contract.window_grid, session.rules, max_side=contract.max_side).batches:
        assert needed(contract, batch.rows, batch.height, batch.width) <= bound, contract.architecture
    rules = gpu_rules(contract, None)
    buckets = build_shape_buckets(contract.crop, contract.default_scales, rules.canvas_step, contract.max_side)
    plan = plan_batches(shapes[:9], contract.window_grid, rules, max_side=contract.max_side, shape_buckets=buckets)
    assert sorted(index for batch in plan.batches for index in batch.indices) == list(range(9))
