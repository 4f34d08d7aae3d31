"""Fine-tuning: what a run takes from its initial checkpoint, and what it reinitializes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from prelunet.evaluator.architectures import Architecture, Conv, architecture
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.errors import CheckpointError, UsageError
from prelunet.training.loop.fine_tune import LAST_LAYER, load_pretrained, sha256_of_checkpoint
from prelunet.training.net.checkpoints import Checkpoint, write_checkpoint
from prelunet.training.net.initialization import Initialization, initial_tensors
from prelunet.training.net.network import PreluNet, load_tensors
from tests.helpers.tiny_nets import CLASSES, TINY, mean_image, tiny_checkpoint

INITIALIZATION = Initialization(rule="fan-in", fc_stds=(0.02, 0.03, 0.04))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "net.safetensors", tiny_checkpoint())
    return tmp_path / "net.safetensors"


def classes(*numbers: int) -> tuple[ClassEntry, ...]:
    """Return classes by number; 0, 1 and 2 are those of the checkpoint."""
    return tuple(ClassEntry(f"n{number:08}", f"other name {number}") for number in numbers)


def load(
    path: Path, entries: tuple[ClassEntry, ...], net: Architecture = TINY, mean_shape: tuple[int, ...] = (3,)
) -> tuple[dict[str, np.ndarray], np.ndarray, list[str]]:
    """Return the initial tensors, the mean and the messages."""
    messages: list[str] = []
    tensors, mean = load_pretrained(path, net, entries, 9, INITIALIZATION, mean_shape, report=messages.append)
    return tensors, mean, messages


def logits(net: Architecture, tensors: dict[str, np.ndarray], count: int) -> np.ndarray:
    module = PreluNet(net, count).eval()
    load_tensors(module, tensors)
    with torch.inference_mode():
        images = np.random.default_rng(1).uniform(-120, 120, (2, 3, net.crop, net.crop))
        return module(torch.from_numpy(images.astype(np.float32))).numpy()


def test_the_same_classes_keep_every_tensor(path: Path) -> None:
    expected = tiny_checkpoint()
    tensors, mean, messages = load(path, classes(0, 1, 2))
    assert tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(tensors[name], tensor, strict=True)
    np.testing.assert_array_equal(mean, expected.mean, strict=True)
    assert messages == [
        f"initial weights from {path}, with the same 3 classes",
        f"mean: that of {path}, not of the training images",
    ]


def test_classes_in_another_order_keep_their_logits(path: Path) -> None:
    order = (2, 0, 1)  # not its own inverse, so that the inverse permutation would fail
    tensors, _, messages = load(path, classes(*order))
    before = logits(TINY, dict(tiny_checkpoint().tensors), CLASSES)
    np.testing.assert_array_equal(logits(TINY, tensors, CLASSES), before[:, order])
    assert "the same 3 classes in another order" in messages[0]


@pytest.mark.parametrize(
    ("numbers", "shared"), [((7, 8, 9), 0), ((0, 1), 2), ((0, 1, 2, 3), 3), ((0, 1, 7), 2), ((5, 2, 4, 6, 7), 1)]
)
def test_other_classes_reinitialize_the_last_layer_and_keep_the_rest(
    path: Path, numbers: tuple[int, ...], shared: int
) -> None:
    tensors, _, messages = load(path, classes(*numbers))
    drawn = initial_tensors(TINY, len(numbers), 9, INITIALIZATION)
    for name, tensor in tensors.items():
        expected = drawn[name] if name in LAST_LAYER else tiny_checkpoint().tensors[name]
        np.testing.assert_array_equal(tensor, expected, strict=True)
    assert f"{shared} of the {len(numbers)} classes are among its 3" in messages[0]
    assert logits(TINY, tensors, len(numbers)).shape == (2, len(numbers))


def test_the_seed_and_the_deviation_decide_the_new_last_layer(path: Path) -> None:
    def drawn(seed: int, std: float) -> np.ndarray:
        initialization = Initialization(fc_stds=(0.01, 0.01, std))
        return load_pretrained(path, TINY, classes(7, 8), seed, initialization, (3,))[0]["fc3.weight"]

    assert not np.array_equal(drawn(1, 0.01), drawn(2, 0.01))
    # Two epsilons: both are rounded to float32 after the multiplication
    np.testing.assert_allclose(drawn(1, 0.02), 2 * drawn(1, 0.01), rtol=2 * float(np.finfo(np.float32).eps))


def conv2(**changes: Any) -> Architecture:
    conv = TINY.trunk[2]
    assert isinstance(conv, Conv)
    return replace(TINY, trunk=(*TINY.trunk[:2], replace(conv, **changes)))


@pytest.mark.parametrize(
    ("net", "difference"),
    [
        (replace(TINY, activation="relu"), "activation: prelu in the checkpoint, relu in the recipe"),
        (replace(TINY, activation="prelu-shared"), "activation: prelu in the checkpoint, prelu-shared in the recipe"),
        (replace(TINY, hidden=7), "hidden: 6 in the checkpoint, 7 in the recipe"),
        (replace(TINY, spp_levels=(3, 2, 1)), "spp_levels: [3, 1, 2] in the checkpoint, [3, 2, 1] in the recipe"),
        (conv2(channels=3), "trunk.2.channels: 4 in the checkpoint, 3 in the recipe"),
        (conv2(pad=0), "trunk.2.pad: 1 in the checkpoint, 0 in the recipe"),  # with the same shapes
        (replace(TINY, trunk=TINY.trunk[:2], spp_levels=(2,)), "trunk.length: 3 in the checkpoint, 2 in the recipe"),
    ],
)
def test_another_architecture_is_refused_with_the_difference(path: Path, net: Architecture, difference: str) -> None:
    with pytest.raises(UsageError) as refused:
        load(path, classes(0, 1, 2), net)
    assert f"  {difference}" in str(refused.value).splitlines()
    assert str(path) in str(refused.value)


def test_a_net_with_another_name_is_refused_in_one_line_with_both_names(path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        load(path, classes(0, 1, 2), architecture("E", activation="relu", crop=224))
    (line,) = str(refused.value).splitlines()
    assert f"{path}: the checkpoint's architecture (tiny, prelu) differs from the recipe's (E, relu). Use " in line


def test_another_crop_keeps_every_tensor_since_the_number_of_bins_is_the_same(path: Path) -> None:
    wider = replace(TINY, crop=40, name="renamed")
    assert wider.window != TINY.window
    tensors, _, _ = load(path, classes(0, 1, 2), wider)
    np.testing.assert_array_equal(tensors["fc1.weight"], tiny_checkpoint().tensors["fc1.weight"])
    assert np.isfinite(logits(wider, tensors, CLASSES)).all()


def test_a_channel_mean_is_expanded_to_a_mean_image(path: Path) -> None:
    _, mean, messages = load(path, classes(0, 1, 2), mean_shape=(24, 24, 3))
    assert mean.shape == (24, 24, 3)
    assert mean.dtype == np.float32
    assert (mean == tiny_checkpoint().mean).all()
    assert mean.flags.writeable  # a copy, not a broadcast view
    assert messages[1:] == [f"mean: that of {path}, not of the training images"]


def with_mean_image(path: Path) -> Checkpoint:
    checkpoint = tiny_checkpoint(mean=mean_image())
    write_checkpoint(path, checkpoint)
    return checkpoint


def test_a_mean_image_of_the_same_crop_is_kept(path: Path) -> None:
    checkpoint = with_mean_image(path)
    _, mean, messages = load(path, classes(0, 1, 2), mean_shape=(24, 24, 3))
    np.testing.assert_array_equal(mean, checkpoint.mean, strict=True)
    assert messages[1:] == [f"mean: that of {path}, not of the training images"]


@pytest.mark.parametrize(("crop", "shape"), [(24, (3,)), (40, (3,)), (40, (40, 40, 3))])
def test_a_mean_image_that_does_not_fit_is_replaced_by_its_channel_means_with_a_remark(
    path: Path, crop: int, shape: tuple[int, ...]
) -> None:
    checkpoint = with_mean_image(path)
    _, mean, messages = load(path, classes(0, 1, 2), replace(TINY, crop=crop), shape)
    assert mean.shape == shape
    by_hand = [sum(float(v) for v in checkpoint.mean[..., channel].flat) / 24**2 for channel in range(3)]
    # Float32 values near 120
    np.testing.assert_allclose(mean, np.broadcast_to(by_hand, shape), rtol=1e-6)
    assert messages[1].startswith(f"mean: that of {path}, not of the training images; of its mean image of 24x24 ")
    assert messages[1].endswith("the recipe asks for a channel mean" if shape == (3,) else "it does not fit the crop")
    assert f"{by_hand[0]:.2f}" in messages[1]


def test_a_file_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "nowhere", classes(0))
    (tmp_path / "net").write_bytes(b"PK\x03\x04 not ours at all")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load(tmp_path / "net", classes(0))


@pytest.mark.parametrize("there", [("last.safetensors", "best.safetensors"), ("best.safetensors",), ()])
def test_a_folder_is_refused_with_the_names_of_its_checkpoints(tmp_path: Path, there: tuple[str, ...]) -> None:
    for name in there:
        (tmp_path / name).touch()
    (tmp_path / "step-0000003.safetensors").touch()
    fix = " or ".join(str(tmp_path / name) for name in there) or "the path of a checkpoint"
    for read in (sha256_of_checkpoint, lambda path: load(path, classes(0))):
        with pytest.raises(UsageError) as refused:
            read(tmp_path)
        assert str(refused.value) == f"{tmp_path}: a folder, not a checkpoint. Give {fix}"
