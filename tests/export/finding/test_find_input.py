"""The preprocessing of a net is found from labels, or from outputs of the original pipeline."""

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from prelunet import find_input
from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.errors import UsageError
from prelunet.export.finding.find import Found
from prelunet.training.importing.preprocessing import PRESETS

CROP, CLASSES, EACH = 28, 5, 24
LEVELS = 30  # of a pixel for a radian of the nets' waves
SIZES = ((71, 52), (47, 66), (90, 61), (44, 59), (63, 83))  # of the images of each class
NAMES = [f"kind {letter}" for letter in "abcde"]
ENTRIES = tuple(ClassEntry(name, name) for name in NAMES)


@dataclass(frozen=True)
class Truth:
    """A pipeline without prelunet: of an RGB image to a net's input."""

    order: str
    normalization: str
    geometry: str
    mean: Any
    std: Any
    largest: int = 1
    filter: str = "bilinear"

    def __call__(self, image: Image.Image) -> np.ndarray:
        pixels = self.crop(image.convert("RGB")).astype(np.float32) * np.float32(self.largest / 255)
        pixels = pixels[:, :, ::-1] if self.order == "BGR" else pixels
        return ((pixels - np.float32(self.mean)) / np.float32(self.std)).transpose(2, 0, 1)

    def crop(self, image: Image.Image) -> np.ndarray:
        if self.geometry.startswith("squashed"):
            return self.resized(image, (CROP, CROP))
        if self.geometry.startswith("padded"):
            part = self.resized(image, tuple(round(side * CROP / max(image.size)) for side in image.size))
            top, left = ((CROP - side) // 2 for side in part.shape[:2])
            canvas = np.full((CROP, CROP, 3), 114, np.uint8)
            canvas[top : top + part.shape[0], left : left + part.shape[1]] = part
            return canvas
        scale = int(self.geometry.split()[3].rstrip(","))
        whole = self.resized(image, tuple(scale * side // min(image.size) for side in image.size))
        down = "transformers" in self.geometry
        top, left = ((side - CROP) // 2 if down else round((side - CROP) / 2) for side in whole.shape[:2])
        return whole[top : top + CROP, left : left + CROP]

    def resized(self, image: Image.Image, size: Any) -> np.ndarray:
        if self.filter == "bicubic, antialiased as torch's":
            planes = torch.from_numpy(np.asarray(image).transpose(2, 0, 1)[None].copy())
            planes = torch.nn.functional.interpolate(planes, size[::-1], mode="bicubic", antialias=True)
            return planes.numpy()[0].transpose(1, 2, 0)
        return np.asarray(image.resize(size, Image.Resampling[self.filter.upper()]))


SHORTER = f"shorter side to 32, crop of {CROP}"
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
TRUTHS = {
    "torchvision": Truth("RGB", "ImageNet's", SHORTER, **IMAGENET),
    "squashed, Caffe": Truth("BGR", "Caffe's mean (", f"squashed to {CROP}", (103.939, 116.779, 123.68), 1, 255),
    "padded, Lite": Truth("RGB", "127 and 128", f"padded to {CROP}, gray 114", 127, 128, 255),
}
AS_TRANSFORMERS = Truth(
    "RGB", "0.5 and 0.5", f"shorter side to 29, crop of {CROP}, rounded as transformers'", 0.5, 0.5,
    filter="bicubic, antialiased as torch's",
)  # fmt: skip


def pictures(kind: int, count: int) -> list[Image.Image]:
    """Return images of a class: its own picture, in small and large patterns, and noise."""
    random = np.random.default_rng([7, kind])
    width, height = SIZES[kind]
    base = np.zeros((height, width, 3))
    for cells in (3, 7, 19):
        grid = random.normal(size=(cells, cells, 3)).astype(np.float32)
        layers = [Image.fromarray(grid[:, :, c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(3)]
        base += 30 * np.stack([np.asarray(layer) for layer in layers], 2)
    # Noise in patches, which a crop does not average away: some images are taken for others.
    images = []
    for _ in range(count):
        noise = random.normal(size=(6, 6, 3)).repeat(height // 6 + 1, 0).repeat(width // 6 + 1, 1)[:height, :width]
        images.append(Image.fromarray(np.clip(np.round(125 + base + 40 * noise), 0, 255).astype(np.uint8)))
    return images


def write_net(
    path: Path, truth: Truth, *, ending: str = "", takes_bytes: bool = False, gray: bool = False, kinds: int = CLASSES
) -> Path:
    """Write a net that looks for the classes' patterns in waves of the pixels, which need the right mean and std.

    ending: "Softmax", or "one", the logit of the second of two classes; takes_bytes: uint8, NHWC, two at a time.
    """
    gain = np.float32(np.mean(truth.std) * 255 / truth.largest / LEVELS)

    def seen(image: Image.Image) -> np.ndarray:
        return np.sin(gain * truth(image.convert("L") if gray else image)[: 1 if gray else 3]).ravel()

    waves = [np.stack([seen(image) for image in pictures(kind, 60)]) for kind in range(kinds)]
    means = np.stack([each.mean(0) for each in waves])
    scale = 8 / np.abs(np.concatenate(waves) @ means.T).max()
    weights, bias = np.float32(scale * means), np.float32(-scale / 2 * (means**2).sum(1))
    if ending == "one":
        weights, bias = weights[1:] - weights[:1], bias[1:] - bias[:1]
    tensors = {"gain": gain, "weights": weights, "bias": bias}
    nodes = [
        helper.make_node("Mul", ["given", "gain"], ["scaled"]),
        helper.make_node("Sin", ["scaled"], ["waves"]),
        helper.make_node("Flatten", ["waves"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weights", "bias"], ["logits"], transB=1),
        helper.make_node("Softmax" if ending == "Softmax" else "Identity", ["logits"], ["y"]),
    ]
    x = helper.make_tensor_value_info("given", TensorProto.FLOAT, ["N", 1 if gray else 3, CROP, CROP])
    if takes_bytes:
        x = helper.make_tensor_value_info("x", TensorProto.UINT8, [2, CROP, CROP, 3])
        tensors |= {"mean": np.float32(truth.mean) * np.ones(3, np.float32), "std": np.float32(truth.std),
                    "unit": np.float32(truth.largest / 255)}  # fmt: skip
        nodes[:0] = [
            helper.make_node("Cast", ["x"], ["numbers"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["numbers", "unit"], ["pixels"]),
            helper.make_node("Sub", ["pixels", "mean"], ["centered"]),
            helper.make_node("Div", ["centered", "std"], ["normalized"]),
            helper.make_node("Transpose", ["normalized"], ["given"], perm=[0, 3, 1, 2]),
        ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2 if takes_bytes else "N", len(bias)])
    initial = [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "net", [x], [y], initial)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finding") / "data"
    for kind, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        for number, image in enumerate(pictures(kind, EACH)):
            image.save(folder / name / f"{kind}{number:03}.png")
    return folder


def names_kept(found: Found, question: Any) -> list[str]:
    return [name for answer in found.answers[question] if answer.standing.kept for name in answer.names]


@pytest.mark.parametrize("name", TRUTHS)
def test_labels_keep_what_a_net_was_made_for_and_say_what_others_cost(name: str, data: Path, tmp_path: Path) -> None:
    truth = TRUTHS[name]
    found = find_input(write_net(tmp_path / "net.onnx", truth), data, classes=ENTRIES)
    assert names_kept(found, "channel order") == [truth.order]
    assert any(each.startswith(truth.normalization) for each in names_kept(found, "mean and std"))
    assert truth.geometry in names_kept(found, "geometry")
    assert truth.filter in names_kept(found, "filter")
    wrong = [answer for answer in found.answers["channel order"] if not answer.standing.kept]
    assert wrong[0].standing.errors.interval[0] > 0, "points of error that the wrong order costs, at least"
    assert found.contrast == 1
    assert "points of error" in str(found)
    assert "what fits the net, which need not be what it was trained with" in str(found)


@pytest.mark.parametrize("truth", [*TRUTHS.values(), AS_TRANSFORMERS])
def test_outputs_of_the_original_pipeline_name_all_of_it(truth: Truth, data: Path, tmp_path: Path) -> None:
    net, folder = write_net(tmp_path / "net.onnx", truth), tmp_path / "some"
    folder.mkdir()
    session, outputs = onnxruntime.InferenceSession(str(net)), []
    for file in sorted(data.glob("*/*.png"))[::6]:
        (folder / file.name).write_bytes(file.read_bytes())
        outputs.append(session.run(None, {"given": truth(Image.open(file))[None]})[0][0])
    np.save(tmp_path / "outputs.npy", np.stack(outputs))
    found = find_input(net, folder, reference=tmp_path / "outputs.npy")
    assert found.exact
    assert names_kept(found, "channel order") == [truth.order]
    assert [each.startswith(truth.normalization) for each in names_kept(found, "mean and std")] == [True]
    assert names_kept(found, "geometry") == [truth.geometry]
    assert names_kept(found, "filter") == [truth.filter]
    assert f"reproduce the outputs of all {len(outputs)} images" in str(found)
    assert "leave open" not in str(found)


def test_outputs_may_be_logits_of_a_net_that_returns_probabilities(data: Path, tmp_path: Path) -> None:
    truth = TRUTHS["padded, Lite"]
    logits = onnxruntime.InferenceSession(str(write_net(tmp_path / "logits.onnx", truth)))
    files = sorted(data.glob("*/*.png"))
    outputs = [logits.run(None, {"given": truth(Image.open(file))[None]})[0][0] for file in files]
    np.save(tmp_path / "outputs.npy", np.stack(outputs))
    found = find_input(
        write_net(tmp_path / "n.onnx", truth, ending="Softmax"), data, reference=tmp_path / "outputs.npy"
    )
    assert found.exact
    assert found.answers["geometry"][0].names == (truth.geometry,)


def test_a_net_that_takes_bytes_is_asked_no_mean_and_can_be_adopted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = write_net(tmp_path / "net.onnx", TRUTHS["torchvision"], takes_bytes=True)
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    words = ["adopt", str(net), "--classes", "classes.txt", "--find-input", str(data), "-o", "model.onnx"]
    assert run(words) == 0
    answers = open_session(tmp_path / "model.onnx", "cpu").contract.training["adopted"]["found"]["answers"]
    assert answers.keys() == {"channel order", "geometry", "filter"}
    assert answers["channel order"] == ["RGB"]
    assert SHORTER in answers["geometry"]


def test_a_gray_net_is_asked_no_channel_order(data: Path, tmp_path: Path) -> None:
    truth = Truth("RGB", "0.5 and 0.5", f"squashed to {CROP}", 0.5, 0.5)
    found = find_input(write_net(tmp_path / "net.onnx", truth, gray=True), data, classes=ENTRIES)
    assert found.answers.keys() == {"mean and std", "geometry", "filter"}
    assert truth.geometry in names_kept(found, "geometry")
    assert any(each.startswith(truth.normalization) for each in names_kept(found, "mean and std"))


def test_one_score_is_that_of_the_second_of_two_classes(data: Path, tmp_path: Path) -> None:
    net = write_net(tmp_path / "net.onnx", TRUTHS["torchvision"], ending="one", kinds=2)
    two = tmp_path / "two"
    for name in NAMES[:2]:
        shutil.copytree(data / name, two / name)
        for file in sorted((data / name).iterdir())[:6]:
            shutil.copy(file, two / name / f"again-{file.name}")
    found = find_input(net, two, classes=ENTRIES[:2])
    assert names_kept(found, "channel order")[0] == "RGB"
    assert any(each.startswith("ImageNet's") for each in names_kept(found, "mean and std"))


def test_a_given_way_joins_the_answers_and_equal_inputs_count_once(data: Path, tmp_path: Path) -> None:
    for file in data.glob("*/*.png"):
        square = tmp_path / "squares" / file.parent.name / file.name
        square.parent.mkdir(parents=True, exist_ok=True)
        Image.open(file).crop((0, 0, 44, 44)).save(square)
    net = write_net(tmp_path / "net.onnx", TRUTHS["torchvision"])
    given = replace(PRESETS["hf-vit"], std=(0.25, 0.25, 0.25))
    found = find_input(net, tmp_path / "squares", classes=ENTRIES, given=given)
    assert "as given" in [name for answer in found.answers["mean and std"] for name in answer.names]
    whole = next(answer for answer in found.answers["geometry"] if f"squashed to {CROP}" in answer.names)
    assert {f"squashed to {CROP}", f"shorter side to {CROP}, crop of {CROP}", "as given"} <= {*whole.names}
    assert "as given" in names_kept(found, "filter"), "torch's filter, which labels cannot tell from Pillow's"


def test_outputs_that_nothing_reproduces_leave_it_open(data: Path, tmp_path: Path) -> None:
    net = write_net(tmp_path / "net.onnx", TRUTHS["torchvision"])
    np.save(tmp_path / "outputs.npy", np.random.default_rng(1).normal(size=(CLASSES * EACH, CLASSES)))
    found = find_input(net, data, reference=tmp_path / "outputs.npy")
    assert not found.exact
    assert "No answer reproduces the outputs" in str(found)
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    words = ["adopt", str(net), "--classes", str(tmp_path / "classes.txt"), "--find-input", str(data)]
    words += ["--reference", str(tmp_path / "outputs.npy"), "--find-log", str(tmp_path), "-o", str(tmp_path / "m.onnx")]
    assert run(words) == 6
    assert not (tmp_path / "m.onnx").exists()


def test_a_net_that_wants_another_contrast_than_all_answers_is_said_to(data: Path, tmp_path: Path) -> None:
    found = find_input(write_net(tmp_path / "net.onnx", Truth("RGB", "", SHORTER, 0, 0.5)), data, classes=ENTRIES)
    assert found.candidate.preprocessing.std == (0.3081,) * 3, "the nearest in the table"
    assert found.contrast < 1
    assert "times the contrast fits better: its mean and std may not be in the table" in str(found)


def test_what_cannot_be_found_is_said(data: Path, tmp_path: Path) -> None:
    net = write_net(tmp_path / "net.onnx", TRUTHS["torchvision"])
    for kind, name in enumerate(NAMES):
        for place, file in enumerate(sorted((data / name).iterdir())):
            other = tmp_path / "shuffled" / NAMES[(kind + place) % CLASSES]
            other.mkdir(parents=True, exist_ok=True)
            (other / file.name).write_bytes(file.read_bytes())
            if place < 2:
                (tmp_path / "few" / name).mkdir(parents=True, exist_ok=True)
                (tmp_path / "few" / name / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="knows the labels no better than by chance"):
        find_input(net, tmp_path / "shuffled", classes=ENTRIES)
    with pytest.raises(UsageError, match="10 labeled images are too few to tell answers apart"):
        find_input(net, tmp_path / "few", classes=ENTRIES)
    with pytest.raises(UsageError, match="lists 6 classes, but"):
        find_input(net, data, classes=(*ENTRIES, ClassEntry("sixth", "sixth")))
    outputs = tmp_path / "outputs.npy"
    for array, message in (
        (np.ones((3, CLASSES)), r"its shape is \(3, 5\), but should be \(10, 5\): 10 images"),
        (np.ones((10, 4)), r"its shape is \(10, 4\), but should be \(10, 5\)"),
        (np.full((10, CLASSES), np.nan), "infinite or NaN"),
        (np.zeros((10, CLASSES)), "has only zeros"),
        (np.array(["a"]), "not a .npy file of numbers"),
    ):
        np.save(outputs, array)
        with pytest.raises(UsageError, match=message):
            find_input(net, tmp_path / "few", reference=outputs)


def test_images_that_cannot_be_decoded_are_counted_and_left_out(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    for file in sorted((tmp_path / "data").glob("*/*.png"))[::40]:
        file.write_bytes(file.read_bytes()[:200])
    found = find_input(write_net(tmp_path / "net.onnx", TRUTHS["torchvision"]), tmp_path / "data", classes=ENTRIES)
    assert (found.images, found.undecodable) == (CLASSES * EACH - 3, 3)
    assert names_kept(found, "channel order") == ["RGB"]
    assert "Images that cannot be decoded, and were left out: 3" in str(found)


@pytest.mark.parametrize("name", TRUTHS)
def test_reversed_classes_are_noticed_however_the_images_were_prepared(name: str, data: Path, tmp_path: Path) -> None:
    net = write_net(tmp_path / "net.onnx", TRUTHS[name])
    with pytest.raises(UsageError, match="would know far more of the labels if its outputs were other classes"):
        find_input(net, data, classes=NAMES[::-1])


def test_classes_in_another_order_are_not_taken_for_a_poor_net(data: Path, tmp_path: Path) -> None:
    net = write_net(tmp_path / "net.onnx", TRUTHS["torchvision"])
    changed = [*NAMES[1::-1], *NAMES[2:]]  # two of five: better than chance
    with pytest.raises(UsageError, match="would know far more of the labels if its outputs were other classes"):
        find_input(net, data, classes=changed)
    found = find_input(net, data, classes=NAMES)
    assert found.error is not None
    assert f"a top-1 error of {found.error:.1f} % on {CLASSES * EACH} labeled images" in str(found)
    for copy in "abc":
        shutil.copytree(data / NAMES[0], tmp_path / "one" / NAMES[0] / copy)
    with pytest.raises(UsageError, match="images of one class only"):
        find_input(net, tmp_path / "one", classes=NAMES, images=50)


def test_a_net_of_colors_in_bgr_is_not_taken_for_one_of_other_classes(tmp_path: Path) -> None:
    """In RGB it calls red blue and blue red, as if its classes were in another order."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, CROP, CROP])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])
    graph = helper.make_graph(nodes, "colors", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "net.onnx"
    )
    random = np.random.default_rng(3)
    for place, name in enumerate(("red", "green", "blue")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 200, (40, 50, 3), np.uint8)
            pixels[..., place] += 50
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.png")
    found = find_input(tmp_path / "net.onnx", tmp_path / "data", classes=["blue", "green", "red"])
    assert names_kept(found, "channel order") == ["BGR"]
    assert found.error == 0


def test_ways_that_these_images_cannot_tell_apart_are_open(data: Path, tmp_path: Path) -> None:
    """Images of the crop's size are not resized, so that no filter differs."""
    net, folder = write_net(tmp_path / "net.onnx", TRUTHS["padded, Lite"]), tmp_path / "small"
    folder.mkdir()
    session, outputs = onnxruntime.InferenceSession(str(net)), []
    for file in sorted(data.glob("*/*.png"))[::12]:
        image = Image.open(file).crop((0, 0, CROP, CROP))
        image.save(folder / file.name)
        outputs.append(session.run(None, {"given": TRUTHS["padded, Lite"](image)[None]})[0][0])
    np.save(tmp_path / "outputs.npy", np.stack(outputs))
    found = find_input(net, folder, reference=tmp_path / "outputs.npy")
    assert found.exact
    assert "These images leave open: geometry, filter" in str(found)


def test_the_options_printed_mean_what_was_found(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = write_net(tmp_path / "net.onnx", TRUTHS["squashed, Caffe"])
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    words = ["adopt", str(net), "--classes", "classes.txt"]
    assert run([*words, "--find-input", str(data), "-o", "found.onnx"]) == 0
    (options,) = re.findall(r"^As options: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert run([*words, *options.split(), "-o", "given.onnx"]) == 0
    one, other = (open_session(tmp_path / f"{name}.onnx", "cpu") for name in ("found", "given"))
    assert one.contract.preparation == other.contract.preparation
    keys = ("mean", "std", "range", "channels")
    assert [one.contract.training["adopted"][key] for key in keys] == [
        other.contract.training["adopted"][key] for key in keys
    ]


@pytest.mark.parametrize("line", ["garbage\n", '["x"]\n'])
def test_a_damaged_log_is_named(data: Path, tmp_path: Path, line: str) -> None:
    net = write_net(tmp_path / "net.onnx", TRUTHS["torchvision"])
    find_input(net, data, classes=ENTRIES, log=tmp_path / "log", images=60)
    (log,) = (tmp_path / "log").iterdir()
    lines = log.read_text().splitlines(keepends=True)
    for number in (0, 3):
        log.write_text("".join([*lines[:number], line, *lines[number + 1 :]]))
        with pytest.raises(UsageError, match=r"damaged.*Delete"):
            find_input(net, data, classes=ENTRIES, log=tmp_path / "log", images=60)


def test_a_search_goes_on_where_it_was_killed(data: Path, tmp_path: Path) -> None:
    net = write_net(tmp_path / "net.onnx", TRUTHS["torchvision"])
    found = find_input(net, data, classes=ENTRIES, log=tmp_path)
    (log,) = tmp_path.glob("net.*.find-input.jsonl")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[: len(lines) // 2]) + lines[len(lines) // 2][:9])
    resumed = find_input(net, data, classes=ENTRIES, log=tmp_path)
    assert str(resumed) == str(found)
    assert sorted(log.read_text().splitlines(keepends=True)) == sorted(lines), "nothing was computed again"
    find_input(net, data, classes=ENTRIES, log=tmp_path, images=100)
    assert len(list(tmp_path.glob("net.*.find-input.jsonl"))) == 2, "other images have a file of their own"


def test_a_net_with_other_weights_in_the_same_files_is_searched_anew(data: Path, tmp_path: Path) -> None:
    path = write_net(tmp_path / "net.onnx", TRUTHS["torchvision"])
    for factor in (1, 2):
        model = onnx.load(path)
        for each in model.graph.initializer:
            each.CopyFrom(onnx.numpy_helper.from_array(factor * onnx.numpy_helper.to_array(each), each.name))
        (tmp_path / "weights").unlink(missing_ok=True)  # onnx would append to it
        onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
        find_input(path, data, classes=ENTRIES, log=tmp_path / "log", images=60)
    assert len(list((tmp_path / "log").iterdir())) == 2


def test_adopt_prints_what_it_found_and_writes_it_only_with_an_output(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net, model = write_net(tmp_path / "net.onnx", TRUTHS["squashed, Caffe"]), tmp_path / "model.onnx"
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    words = ["adopt", str(net), "--classes", "classes.txt", "--find-input", str(data)]
    assert run(words) == 0
    printed = capsys.readouterr().out
    assert "channel order   BGR\n" in printed
    assert len(list(tmp_path.glob("net.*.find-input.jsonl"))) == 1
    assert not model.exists()
    assert run([*words, "-o", str(model)]) == 0
    contract = open_session(model, "cpu").contract
    adopted = contract.training["adopted"]
    words = {"shorter": "shorter side", "squash": "squashed", "pad": "padded"}
    assert adopted["found"]["answers"]["geometry"][0].startswith(words[contract.preparation.resize])
    assert adopted["channels"] == "bgr"
    assert adopted["found"]["answers"]["channel order"] == ["BGR"]
    assert (adopted["found"]["confidence"], adopted["found"]["images"]) == (0.95, CLASSES * EACH)
    capsys.readouterr()
    assert run(["inspect", str(model)]) == 0
    assert f"images {CLASSES * EACH}" in " ".join(capsys.readouterr().out.split())
    assert run(["adopt", str(net), "--classes", "classes.txt"]) == 2
    assert "no -o: give the model file to write" in capsys.readouterr().err
