"""Measurements of layers, compared with the net written out image by image; and their log over a run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import prelunet.training.inspection.layer_statistics
from prelunet.evaluator.architectures import ACTIVATIONS, Activation
from prelunet.evaluator.datasets import open_dataset
from prelunet.evaluator.errors import RunFolderError, UsageError
from prelunet.training.data.image_cache import ImageCache
from prelunet.training.inspection.layer_log import LayerResponse, read_layer_log, std
from prelunet.training.inspection.layer_statistics import measure_layers, sample_views
from prelunet.training.loop.tracking import RunLogs
from prelunet.training.net.network import PreluNet, network_from_checkpoint
from tests.helpers.tiny_nets import CLASSES, TINY, tiny_checkpoint
from tests.training.training_folders import make_dataset

LAYERS = ["conv1", "conv2", "fc1", "fc2", "fc3"]
ROUNDING = {"rel": 1e-9, "abs": 1e-12}  # float64 on both sides: only the order of sums differs


def some_images(count: int = 7, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Return crops (N, 3, 24, 24) with values around 0, channels with different means, and labels."""
    random = np.random.default_rng(seed)
    images = random.uniform(-120, 130, (count, 3, TINY.crop, TINY.crop)) + np.array([-30, 5, 60])[:, None, None]
    return torch.from_numpy(images), torch.from_numpy(random.integers(0, CLASSES, count))


def float64_net(activation: Activation = "prelu", **changes: np.ndarray) -> PreluNet:
    checkpoint = tiny_checkpoint(activation)
    # A thousandth of TINY's first weights: with small logits, softmax does not saturate.
    tensors = {**checkpoint.tensors, "conv1.weight": checkpoint.tensors["conv1.weight"] / 1000}
    tensors |= {name: value.astype(np.float32) for name, value in changes.items()}
    return network_from_checkpoint(replace(checkpoint, tensors=tensors)).double()


def plain_responses(net: PreluNet, image: Tensor, label: Tensor) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return response and gradient of each layer for one image (3, 24, 24): TINY written out, with its own autograd."""
    values, recorded = dict(net.named_parameters()), {}

    def activated(name: str, response: Tensor) -> Tensor:
        response.retain_grad()
        recorded[name] = response
        slope = values.get(f"{name}.slope")
        negative = {"relu": 0.0, "lrelu": 0.01}.get(net.architecture.activation)
        a = torch.full((1,), negative, dtype=torch.float64) if slope is None else slope
        return torch.where(response > 0, response, response * a.reshape(-1, *[1] * (response.ndim - 1)))

    maps = activated("conv1", F.conv2d(image[None], values["conv1.weight"], values["conv1.bias"], 2, 1)[0])
    maps = F.max_pool2d(maps, 2, 2)
    maps = activated("conv2", F.conv2d(maps[None], values["conv2.weight"], values["conv2.bias"], 1, 1)[0])
    hidden = torch.cat([F.adaptive_max_pool2d(maps, level).flatten() for level in (3, 1, 2)])
    for name in ("fc1", "fc2"):
        hidden = activated(name, values[f"{name}.weight"] @ hidden + values[f"{name}.bias"])
    logits = values["fc3.weight"] @ hidden + values["fc3.bias"]
    logits.retain_grad()
    recorded["fc3"] = logits
    (torch.logsumexp(logits, 0) - logits[label]).backward()
    net.zero_grad()
    return {name: (response.detach().numpy(), response.grad.numpy()) for name, response in recorded.items()}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_measurements_equal_those_of_the_net_written_out_image_by_image(activation: Activation) -> None:
    net, (images, labels) = float64_net(activation), some_images()
    alone = [plain_responses(net, image, label) for image, label in zip(images, labels, strict=True)]
    found = measure_layers(net, images, labels)
    assert [layer.layer for layer in found] == LAYERS
    for layer in found:
        responses, gradients = (np.stack([recorded[layer.layer][which] for recorded in alone]) for which in (0, 1))
        assert layer.mean == pytest.approx(responses.mean(), **ROUNDING)
        assert layer.variance == pytest.approx(responses.var(), **ROUNDING)
        assert layer.gradient_variance == pytest.approx(gradients.var(), **ROUNDING)
        assert layer.gradient_variance > 0
        slope = tiny_checkpoint(activation).tensors.get(f"{layer.layer}.slope")
        assert layer.slope == (None if slope is None else pytest.approx(slope.mean(), rel=1e-6))  # float32 beside
        if layer.layer == "fc3":
            assert layer.never_positive is None
        else:
            channels = np.moveaxis(responses, 1, 0).reshape(responses.shape[1], -1)
            assert layer.never_positive == pytest.approx(np.mean((channels <= 0).all(axis=1)))


def test_the_gradient_of_the_logits_is_softmax_minus_the_truth() -> None:
    net, (images, labels) = float64_net(), some_images()
    expected = net(images).detach().softmax(dim=1).numpy() - np.eye(CLASSES)[labels.numpy()]
    assert measure_layers(net, images, labels)[-1].gradient_variance == pytest.approx(expected.var(), **ROUNDING)


def test_measurements_do_not_depend_on_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    net, (images, labels) = float64_net(), some_images(count=7)
    whole = measure_layers(net, images, labels)
    shown: list[int] = []
    monkeypatch.setattr(prelunet.training.inspection.layer_statistics, "PIXELS_PER_BATCH", 3 * TINY.crop**2 + 1)
    parts = measure_layers(net, images, labels, shown.append)
    assert shown == [3, 3, 1]
    for one, other in zip(whole, parts, strict=True):
        assert one.never_positive == other.never_positive
        for key in ("mean", "variance", "gradient_variance"):
            assert getattr(one, key) == pytest.approx(getattr(other, key), **ROUNDING), (one.layer, key)


@pytest.mark.parametrize("activation", ["relu", "prelu"])
def test_a_channel_counts_as_never_positive_only_if_it_is_so_everywhere(activation: Activation) -> None:
    weight = np.zeros((5, 3, 3, 3))
    weight[3, 2, 1, 1] = 1.0
    # Channel 0 is positive, 1 and 4 negative, 2 always 0; 3 will be positive at one pixel of the last image.
    net = float64_net(activation, **{"conv1.weight": weight, "conv1.bias": np.array([1.0, -1.0, 0.0, -50.0, -2.0])})
    images, labels = some_images(count=4)
    images[:, 2] = 0.0
    assert measure_layers(net, images, labels)[0].never_positive == pytest.approx(4 / 5)
    images[3, 2, 10, 12] = 51.0  # under the center of a kernel: even rows and columns
    assert measure_layers(net, images, labels)[0].never_positive == pytest.approx(3 / 5)


@pytest.mark.parametrize("training_mode", [True, False])
def test_measuring_does_not_change_net_gradients_or_random_state(training_mode: bool) -> None:
    net, (images, labels) = float64_net(), some_images()
    net.train(training_mode)
    called: list[str] = []

    def response_hook(name: str, response: Tensor) -> None:
        called.append(name)

    net.response_hook = response_hook
    gradient = torch.ones_like(net.get_parameter("fc1.weight"))
    net.get_parameter("fc1.weight").grad = gradient.clone()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    measure_layers(net, images, labels)
    assert (net.training, net.response_hook, called) == (training_mode, response_hook, [])
    assert torch.equal(torch.get_rng_state(), random)
    assert not images.requires_grad
    for name, value in net.named_parameters():
        assert torch.equal(value, before[name])
        if name == "fc1.weight":
            assert value.grad is not None
            assert torch.equal(value.grad, gradient)
        else:
            assert value.grad is None


def test_frozen_parameters_and_an_enclosing_no_grad_do_not_matter() -> None:
    net, (images, labels) = float64_net(), some_images()
    expected = measure_layers(net, images, labels)
    net.requires_grad_(False)
    with torch.no_grad():
        assert measure_layers(net, images, labels) == expected


def test_the_hook_is_restored_if_the_net_fails() -> None:
    net, (images, labels) = float64_net(), some_images()
    with pytest.raises(AssertionError, match="not one crop"):
        measure_layers(net, torch.cat([images, images], dim=2), labels)
    assert net.response_hook is None


@pytest.mark.parametrize(("count", "expected"), [(4, [0, 2, 5, 8]), (11, list(range(11))), (300, list(range(11)))])
def test_layers_are_measured_on_views_spread_over_all_classes(tmp_path: Path, count: int, expected: list[int]) -> None:
    dataset = open_dataset(make_dataset(tmp_path, val=4), split="val")
    image_cache = ImageCache(dataset, {"ox/003.png": "broken"})  # 11 of 12 are usable
    views = sample_views(image_cache, 14, 12, count)
    assert views.images.shape == (len(expected), 12, 12, 3)
    assert views.labels.tolist() == [image_cache.samples[place].label for place in expected]
    for view, place in zip(views.images, expected, strict=True):
        np.testing.assert_array_equal(view, image_cache.central_view(place, 14, 12))


@pytest.mark.parametrize("gone", [False, True])
def test_unreadable_images_are_skipped_in_the_measurement(tmp_path: Path, gone: bool) -> None:
    dataset = open_dataset(make_dataset(tmp_path, val=1), split="val")
    broken = tmp_path / "val" / dataset.samples[1].file
    if gone:
        broken.unlink()
    else:
        broken.write_bytes(bytes(broken.stat().st_size))
    views = sample_views(ImageCache(dataset, {}), 14, 12)
    assert views.labels.tolist() == [0, 2]
    assert list(views.refused) == [dataset.samples[1].file]


def layer(name: str = "conv1", **changes: float | None) -> LayerResponse:
    return replace(LayerResponse(name, -1.5, 4.0, 1e-9, 0.125, 0.25), **changes)


def run_logs(folder: Path) -> RunLogs:
    return RunLogs(folder, events=False, diagnose=True, report=pytest.fail)


def lines_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_layer_is_written_with_six_digits_and_null_for_non_finite_numbers() -> None:
    odd = layer(mean=1 / 3, variance=float("inf"), gradient_variance=float("nan"), never_positive=None)
    assert odd.to_json() == {
        "layer": "conv1",
        "mean": 0.333333,
        "variance": None,
        "gradient_variance": None,
        "never_positive": None,
        "slope": 0.25,
    }
    assert std(layer().to_json(), "variance") == 2.0
    assert std(odd.to_json(), "variance") is None


def test_the_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    logs = run_logs(tmp_path)
    for step in (5, 10):
        layers = (layer(variance=float(step)), layer("fc3", never_positive=None, slope=None))
        logs.write_layers(step, lambda layers=layers: layers)
    with (tmp_path / "diagnosis.jsonl").open("a") as file:
        file.write('{"step": 15, "lay')  # being written
    first, last = read_layer_log(tmp_path)
    assert (first["step"], last["step"]) == (5, 10)
    assert last["layers"][0] == layer(variance=10.0).to_json()
    assert last["layers"][1]["slope"] is None


@pytest.mark.parametrize(("evaluated", "kept"), [(True, [5, 10]), (False, [5])])
def test_resuming_removes_the_lines_that_will_be_repeated(tmp_path: Path, evaluated: bool, kept: list[int]) -> None:
    path, logs = tmp_path / "diagnosis.jsonl", run_logs(tmp_path)
    logs.resume(10, evaluated=evaluated)  # no file yet
    assert not path.exists()
    for step in (5, 10, 15):
        logs.write_layers(step, lambda: (layer(),))
    with path.open("a") as file:
        file.write('{"step": 20, "lay')  # truncated by a crash
    logs.resume(10, evaluated=evaluated)
    assert lines_of(path) == kept
    logs.write_layers(15, lambda: (layer(),))
    assert lines_of(path) == [*kept, 15]


def test_resuming_at_a_damaged_line_names_it(tmp_path: Path) -> None:
    (tmp_path / "diagnosis.jsonl").write_text('{"step": 5, "layers": []}\nrubbish\n')
    with pytest.raises(RunFolderError, match="line 2 is damaged"):
        run_logs(tmp_path).resume(5, evaluated=True)


@pytest.mark.parametrize(("line", "fault"), [("rubbish", "Expecting value"), ('{"layers": []}', "step should be")])
def test_a_damaged_history_is_refused_with_the_line(tmp_path: Path, line: str, fault: str) -> None:
    good = json.dumps({"step": 5, "layers": [layer().to_json()]})
    (tmp_path / "diagnosis.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(RunFolderError, match=rf"line 2 is damaged .*{fault}"):
        read_layer_log(tmp_path)


def test_a_folder_without_a_history_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="train --diagnose"):
        read_layer_log(tmp_path)
    (tmp_path / "diagnosis.jsonl").write_text("")
    with pytest.raises(UsageError, match="not been evaluated yet"):
        read_layer_log(tmp_path)
