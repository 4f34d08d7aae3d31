"""What lies beside a net says how its images are prepared."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from prelunet.evaluator.cli import run
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.errors import ContractError
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.protocols import build_protocol
from tests.export.foreign.foreign_nets import CLASSES, CROP, ReferenceNet, net, of_gray, photo

PHOTOS = (photo(61, 83, "PNG"), photo(97, 52, "PNG", seed=1))
LABELS = {str(index): f"thing {index}" for index in range(CLASSES)}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.25, 0.5]}
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
VIT = {"do_resize": True, "size": {"height": CROP, "width": CROP}, "resample": 2, **HALF}
CLIP = {
    "do_center_crop": True, "crop_size": {"height": CROP, "width": CROP}, "size": {"shortest_edge": 47}, "resample": 3,
    "image_mean": CLIP_MEAN, "image_std": CLIP_STD,
}  # fmt: skip
CONVNEXT = {"size": {"shortest_edge": CROP}, "crop_pct": 0.8, "resample": 3, **HALF}
DEIT = {"size": {"height": 47, "width": 47}, "crop_size": {"height": CROP, "width": CROP}, "resample": 3, **HALF}
BYTES = {**VIT, "do_rescale": False, "do_normalize": False, "size": CROP}
TIMM = {
    "input_size": [3, CROP, CROP], "interpolation": "bicubic", "crop_pct": 0.84, "crop_mode": "center",
    "mean": CLIP_MEAN, "std": CLIP_STD,
}  # fmt: skip


def folder_of(folder: Path, metadata: dict[str, str] | None = None, **files: Any) -> Path:
    """Write a net with metadata, and JSON files beside it."""
    path = net(folder, name="model")
    model = onnx.load(path)
    onnx.helper.set_model_props(model, metadata or {})
    onnx.save(model, path)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


# files beside the net → what gets the scale and the scale, filter, mean, std, and the largest pixel value
STATED: dict[str, tuple[dict[str, Any], tuple[str, int], str, list[float], list[float], int]] = {
    "ViT": ({"preprocessor_config": VIT}, ("squash", CROP), "bilinear", [0.5] * 3, [0.5, 0.25, 0.5], 1),
    "DeiT": (
        {"preprocessor_config": {**DEIT, "image_processor_type": "DeiTImageProcessor"}}, ("squash", 47), "bicubic",
        [0.5] * 3, [0.5, 0.25, 0.5], 1,
    ),
    "DeiT, old": (
        {"preprocessor_config": {**DEIT, "size": 47, "crop_size": CROP, "image_processor_type": "DeiTImageProcessor"}},
        ("squash", 47), "bicubic", [0.5] * 3, [0.5, 0.25, 0.5], 1,
    ),
    "ResNet, old": (
        {"preprocessor_config": {**CONVNEXT, "size": CROP, "feature_extractor_type": "ConvNextFeatureExtractor"}},
        ("shorter", 50), "bicubic", [0.5] * 3, [0.5, 0.25, 0.5], 1,
    ),
    "CLIP, old": (
        {"preprocessor_config": {**CLIP, "size": 47, "crop_size": CROP, "image_processor_type": "CLIPImageProcessor"}},
        ("shorter", 47), "bicubic", CLIP_MEAN, CLIP_STD, 1,
    ),
    "CLIP": ({"preprocessor_config": CLIP}, ("shorter", 47), "bicubic", CLIP_MEAN, CLIP_STD, 1),
    "a whole processor": (
        {"processor_config": {"image_processor": CLIP}}, ("shorter", 47), "bicubic", CLIP_MEAN, CLIP_STD, 1
    ),
    "ConvNeXt": (
        {"preprocessor_config": {**CONVNEXT, "image_processor_type": "ConvNextImageProcessorFast"}}, ("shorter", 50),
        "bicubic", [0.5] * 3, [0.5, 0.25, 0.5], 1,
    ),
    "pixels as they are": ({"preprocessor_config": BYTES}, ("squash", CROP), "bilinear", [0.0] * 3, [1.0] * 3, 255),
    "nearest": (
        {"preprocessor_config": {**VIT, "resample": 0}}, ("squash", CROP), "nearest", [0.5] * 3, [0.5, 0.25, 0.5], 1
    ),
    "timm": ({"pretrained_cfg": TIMM}, ("shorter", 47), "bicubic", CLIP_MEAN, CLIP_STD, 1),
    "timm, squashed": (
        {"pretrained_cfg": {**TIMM, "crop_mode": "squash", "interpolation": "lanczos"}}, ("squash", 47), "lanczos",
        CLIP_MEAN, CLIP_STD, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATED)
def test_a_folder_is_adopted_without_options_and_evaluated_as_its_files_say(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated, (resize, scale), resampling, mean, std, largest = STATED[name]
    if "pretrained_cfg" in stated:
        files = {"config": {**stated, "label_names": list(LABELS.values())}}
    else:
        files = {"config": {"id2label": LABELS}, **stated}
    folder_of(tmp_path, **files)
    output = tmp_path / "adopted.prelunet.onnx"
    assert run(["adopt", str(tmp_path), "-o", str(output)]) == 0
    assert "beside the net: " in capsys.readouterr().out
    session = open_session(output, "cpu")
    assert [entry.name for entry in session.contract.classes] == list(LABELS.values())
    assert session.contract.to_metadata()["prelunet.contract_version"] == "3"
    filters = {each.name.lower(): each for each in Image.Resampling}
    plain = ReferenceNet(tmp_path / "model.onnx", mean=mean, std=std, pixel_range=largest)

    def expected(data: bytes) -> np.ndarray:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        size = [int(scale * side / min(image.size)) for side in image.size] if resize == "shorter" else [scale, scale]
        # transformers resizes tensors, and its center_crop rounds down; timm has torchvision's for Pillow, which rounds
        # to the even number
        tensors = "pretrained_cfg" not in stated
        if tensors:
            planes = torch.from_numpy(np.asarray(image).transpose(2, 0, 1)[None].copy())
            wide = {} if resampling == "nearest" else {"antialias": True}
            planes = torch.nn.functional.interpolate(planes, size[::-1], mode=resampling, **wide)
            pixels = planes.numpy()[0].transpose(1, 2, 0)
        else:
            pixels = np.asarray(image.resize(size, filters[resampling]))
        top, left = ((side - CROP) // 2 if tensors else round((side - CROP) / 2.0) for side in pixels.shape[:2])
        return plain.scores(pixels[top : top + CROP, left : left + CROP])

    results = classify_images(session, map(decode_rgb, PHOTOS), build_protocol("center", session.contract))
    # float32 in the graph and in numpy, in the same order: only the order of sums differs
    np.testing.assert_allclose([each.scores for each in results], list(map(expected, PHOTOS)), rtol=0, atol=1e-5)


def test_options_replace_what_the_files_say(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, config={"id2label": LABELS}, preprocessor_config=VIT)
    output = tmp_path / "adopted.prelunet.onnx"
    words = ["adopt", str(folder), "--std", "0.7", "--interpolation", "bicubic", "-o", str(output)]
    assert run(words) == 0
    contract = open_session(output, "cpu").contract
    assert contract.interpolation == "bicubic"
    assert contract.training["adopted"]["mean"] == [0.5] * 3
    assert contract.training["adopted"]["std"] == [0.7] * 3


@pytest.mark.parametrize("option", [[], ["--crop", str(CROP)], ["--resize", "shorter"]])
def test_an_option_that_repeats_what_the_files_say_changes_nothing(tmp_path: Path, option: list[str]) -> None:
    stated = {"pretrained_cfg": {**TIMM, "crop_pct": 0.95}, "label_names": list(LABELS.values())}
    folder_of(tmp_path, config=stated)
    assert run(["adopt", str(tmp_path), *option, "-o", str(tmp_path / "adopted")]) == 0
    contract = open_session(tmp_path / "adopted", "cpu").contract
    assert build_protocol("center", contract).scales == (int(CROP / 0.95),)  # timm's floor


def test_a_folder_with_what_was_adopted_from_its_net_is_adopted_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, config={"id2label": LABELS}, preprocessor_config=VIT)
    (folder / "model.onnx").rename(folder / "net.onnx")
    for _ in range(2):
        assert run(["adopt", str(folder), "-o", str(folder / "adopted.onnx"), "--force"]) == 0


def test_squashing_by_option_replaces_the_scale_that_the_files_say(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, config={"id2label": LABELS}, preprocessor_config=CLIP)
    assert run(["adopt", str(folder), "--resize", "squash", "-o", str(tmp_path / "adopted")]) == 0
    contract = open_session(tmp_path / "adopted", "cpu").contract
    assert build_protocol("center", contract).scales == (CROP,)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"pretrained_cfg": TIMM}, "preprocessor_config": {**CLIP, "resample": 2}},
         "config.json: interpolation bicubic, but preprocessor_config.json: bilinear. Correct one of them, or move"),
        ({"config": {"id2label": LABELS}}, "Give --preset, or --mean and --std"),
        ({"preprocessor_config": VIT}, "no classes. Give --classes; neither the net's metadata nor a file beside it"),
        ({"preprocessor_config": {**VIT, "resample": 4}}, "'resample' is 4, but only 0 to 3"),
        ({"preprocessor_config": {**VIT, "rescale_factor": 1 / 127.5}}, "'rescale_factor' is 0.00784"),
        ({"preprocessor_config": {**VIT, "rescale_offset": True}}, "images to -1 to 1 ('rescale_offset')"),
        ({"preprocessor_config": {**CLIP, "do_center_crop": False}}, "it crops nothing"),
        ({"preprocessor_config": {**CLIP, "crop_pct": 0.9}}, "it has both 'crop_pct' and 'crop_size'"),
        ({"preprocessor_config": {**VIT, "size": {"height": 32, "width": 40}}}, "images of 32x40 pixels, but crops"),
        ({"preprocessor_config": {**VIT, "image_processor_type": "LevitImageProcessor"}}, "is LevitImageProcessor,"),
        ({"config": {"id2label": LABELS}, "preprocessor_config": {**CLIP, "size": {"shortest_edge": 36}}},
         "images resized to 36 pixels, but crops of 40 need from 40 to 640"),
        ({"preprocessor_config": {"size": 40}}, "preprocessor_config.json: cannot be used: it lacks 'image_mean'"),
        ({"preprocessor_config": {"size": 40, **HALF}}, "it lacks 'resample'"),
        ({"preprocessor_config": "[1, 2"}, "preprocessor_config.json: cannot be used: Expecting"),
        ({"config": {"pretrained_cfg": {**TIMM, "crop_mode": "zoom"}}}, "'crop_mode' is zoom, but only center, squash"),
        ({"config": {"pretrained_cfg": {**TIMM, "interpolation": "random"}}}, "'interpolation' is random, but only"),
        ({"config": {"pretrained_cfg": {**TIMM, "crop_pct": 0}}}, "config.json: cannot be used: division by zero"),
        ({"config": {"pretrained_cfg": {**TIMM, "crop_pct": 1e-320}}}, "config.json: cannot be used: cannot convert"),
        ({"config": {"pretrained_cfg": {**TIMM, "mean": [True] * 3}}}, "'mean' should be three numbers, or one"),
        ({"processor_config": {"image_processor": None}}, "image_processor should be an object, not null"),
        ({"preprocessor_config": {**CLIP, "size": {"shortest_edge": 0}}}, "shortest_edge should be a whole"),
        ({"preprocessor_config": {**CLIP, "size": {"shortest_edge": None}}}, "shortest_edge should be a whole"),
        ({"preprocessor_config": {**VIT, "resample": True}}, "resample should be a whole number"),
        ({"preprocessor_config": {**VIT, "image_std": [10**400] * 3}}, "preprocessor_config.json: cannot be used: int"),
        ({"config": {"pretrained_cfg": {**TIMM, "std": [0.5, 0.5]}}}, "'std' should be three numbers, or one of gray"),
        ({"preprocessor_config": {**VIT, "image_mean": [0.5] * 4}}, "'image_mean' should be three numbers, or one"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_or_cannot_be_computed_is_refused_with_its_file(
    files: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, **files)
    assert run(["adopt", str(folder), "-o", str(tmp_path / "new")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new").exists()


def test_the_net_of_a_folder_may_lie_in_onnx_and_is_named_if_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "onnx").mkdir()
    folder_of(tmp_path / "onnx")
    (tmp_path / "onnx" / "model_quantized.onnx").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps({"id2label": LABELS}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(VIT))
    assert run(["adopt", str(tmp_path), "-o", str(tmp_path / "adopted")]) == 0
    (tmp_path / "onnx" / "model.onnx").rename(tmp_path / "onnx" / "model_fp32.onnx")
    capsys.readouterr()
    assert run(["adopt", str(tmp_path), "-o", str(tmp_path / "new")]) == 2
    assert "several ONNX files (onnx/model_fp32.onnx, onnx/model_quantized.onnx)" in capsys.readouterr().err


THINGS = list(LABELS.values())
ULTRALYTICS = {
    "author": "Ultralytics", "task": "classify", "imgsz": f"[{CROP}, {CROP}]", "names": str(dict(enumerate(THINGS))),
}  # fmt: skip
NUMBERED = {name: index for index, name in enumerate(THINGS)}


def test_the_metadata_of_ultralytics_need_no_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, ULTRALYTICS)
    output = tmp_path / "adopted.prelunet.onnx"
    assert run(["adopt", str(folder / "model.onnx"), "-o", str(output)]) == 0
    said = f"metadata of model.onnx: mean 0,0,0, std 1,1,1, interpolation bilinear, crop {CROP}, center_scale {CROP}, "
    assert f"beside the net: {said}resize shorter, 7 classes" in capsys.readouterr().out
    session = open_session(output, "cpu")
    assert [entry.name for entry in session.contract.classes] == THINGS
    plain = ReferenceNet(tmp_path / "model.onnx", mean=(0.0,) * 3, std=(1.0,) * 3)
    results = classify_images(session, map(decode_rgb, PHOTOS), build_protocol("center", session.contract))
    wanted = [plain.center(data, scale=CROP) for data in PHOTOS]
    np.testing.assert_allclose([each.scores for each in results], wanted, rtol=0, atol=1e-5)  # as above


@pytest.mark.parametrize(
    ("metadata", "files"),
    [
        ({"names": str(THINGS)}, {}),
        ({"names": json.dumps(THINGS)}, {}),
        ({"character": "\n".join(THINGS)}, {}),
        ({}, {"class_indices.json": json.dumps(NUMBERED)}),
        ({}, {"class_to_idx.json": json.dumps(NUMBERED)}),
        ({}, {"index_to_name.json": json.dumps({str(index): name for name, index in NUMBERED.items()})}),
        (
            {},
            {
                "index_to_name.json": json.dumps(
                    {str(index): [f"n{index:08}", name] for name, index in NUMBERED.items()}
                )
            },
        ),
        ({}, {"metadata.yaml": "names:\n" + "".join(f"  {index}: {name}\n" for index, name in enumerate(THINGS))}),
        ({}, {"data.yaml": "nc: 7\nnames: [" + ", ".join(THINGS) + "]\n"}),
        ({"names": str(THINGS)}, {"class_to_idx.json": json.dumps(NUMBERED)}),
    ],
)
def test_classes_are_found_where_makers_write_them(
    metadata: dict[str, str], files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(tmp_path, metadata)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    output = tmp_path / "adopted.prelunet.onnx"
    assert run(["adopt", str(tmp_path / "model.onnx"), "--preset", "torchvision", "-o", str(output)]) == 0
    assert [entry.name for entry in open_session(output, "cpu").contract.classes] == THINGS
    source = next(iter(files), "metadata of model.onnx")
    assert f"beside the net: {source}: 7 classes\n" in capsys.readouterr().out


def test_lists_of_classes_that_contradict_each_other_are_refused_unless_one_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(tmp_path, {"names": str([*THINGS[:3], "another", *THINGS[4:]])}, class_to_idx=NUMBERED)
    words = ["adopt", str(tmp_path / "model.onnx"), "--preset", "torchvision", "-o", str(tmp_path / "adopted")]
    assert run(words) == 2
    said = "metadata of model.onnx: class 3 is 'another', but 'thing 3' in class_to_idx.json. Give --classes"
    assert said in capsys.readouterr().err
    (tmp_path / "class_to_idx.json").write_text(json.dumps(THINGS[:5]))
    assert run(words) == 2
    assert "metadata of model.onnx: 7 classes, but 5 in class_to_idx.json. Give" in capsys.readouterr().err
    (tmp_path / "names.txt").write_text("\n".join(THINGS))
    assert run([*words, "--classes", str(tmp_path / "names.txt")]) == 0


IMAGE = {"Image.BitmapPixelFormat": "Bgr8", "Image.NominalPixelRange": "Normalized_1_1"}


@pytest.mark.parametrize(
    ("nominal", "mean", "std", "largest"),
    [("NominalRange_0_255", 0.0, 1.0, 255), ("Normalized_0_1", 0.0, 1.0, 1), ("Normalized_1_1", 0.5, 0.5, 1)],
)
def test_onnxs_own_metadata_about_images_are_obeyed(
    nominal: str, mean: float, std: float, largest: int, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, {**IMAGE, "Image.NominalPixelRange": nominal}, class_to_idx=NUMBERED)
    output = tmp_path / "adopted.prelunet.onnx"
    assert run(["adopt", str(folder), "-o", str(output)]) == 0
    session = open_session(output, "cpu")
    plain = ReferenceNet(folder / "model.onnx", mean=(mean,) * 3, std=(std,) * 3, pixel_range=largest, bgr=True)
    results = classify_images(session, map(decode_rgb, PHOTOS), build_protocol("center", session.contract))
    np.testing.assert_allclose([each.scores for each in results], list(map(plain.center, PHOTOS)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {**IMAGE, "Image.BitmapPixelFormat": "Bgra8"},
            "'Image.BitmapPixelFormat' is Bgra8, but only Rgb8, Bgr8, Gray8",
        ),
        (
            {**IMAGE, "Image.NominalPixelRange": "NominalRange_16_235"},
            "'Image.NominalPixelRange' is NominalRange_16_235",
        ),
        ({**ULTRALYTICS, "imgsz": "[40, 64]"}, "images of 40x64 pixels, but crops are square"),
        ({**ULTRALYTICS, "imgsz": "open("}, "model.onnx: its metadata: cannot be used"),
        ({**ULTRALYTICS, "imgsz": "1+" * 100_000 + "1"}, "model.onnx: its metadata: cannot be used"),
        ({**ULTRALYTICS, "names": "{[1]: 'a'}"}, "'names' of its metadata: "),
        (
            {**ULTRALYTICS, "names": "{0: 'a', 2: 'b'}"},
            "'names' of its metadata: class index 1 of 2 classes is missing",
        ),
    ],
)
def test_metadata_that_cannot_be_used_are_refused_with_their_key(
    metadata: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, metadata, class_to_idx=NUMBERED)
    assert run(["adopt", str(folder), "-o", str(tmp_path / "adopted")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "adopted").exists()


def test_a_border_of_timm_has_the_color_of_the_mean_and_is_not_cropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = {**TIMM, "crop_mode": "border", "crop_pct": 1.0}
    folder = folder_of(tmp_path, config={"pretrained_cfg": stated, "label_names": THINGS})
    output = tmp_path / "adopted.prelunet.onnx"
    assert run(["adopt", str(folder), "-o", str(output)]) == 0
    contract = open_session(output, "cpu").contract
    preparation = contract.preparation
    assert build_protocol("center", contract).scales == (CROP,)
    assert (preparation.resize, preparation.pad_color) == ("pad", (123, 117, 104))  # 255 times the mean of CLIP
    folder_of(tmp_path, config={"pretrained_cfg": {**stated, "crop_pct": 0.84}, "label_names": THINGS})
    assert run(["adopt", str(folder), "-o", str(output), "--force"]) == 2
    assert "'crop_mode' is border with 'crop_pct' 0.84, but only 1 is supported" in capsys.readouterr().err


def test_one_number_of_timm_is_that_of_gray_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net(tmp_path, of_gray, name="model", shape=["N", 1, CROP, CROP])
    stated = {**TIMM, "input_size": [1, CROP, CROP], "mean": [0.4], "std": [0.25]}
    stated |= {"crop_mode": "border", "crop_pct": 1.0}
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": stated, "label_names": THINGS}))
    assert run(["adopt", str(tmp_path), "-o", str(tmp_path / "adopted")]) == 0
    contract = open_session(tmp_path / "adopted", "cpu").contract
    assert contract.preparation.gray
    assert contract.preparation.pad_color == (102, 102, 102)
    assert "gray (x - 0.4) / 0.25, x from 0 to 1" in capsys.readouterr().out


def test_a_folder_without_a_net_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adopt", str(tmp_path), "--preset", "timm", "-o", str(tmp_path / "adopted")]) == 2
    assert f"{tmp_path}: a folder with no ONNX file, also not in its folder `onnx`" in capsys.readouterr().err


def test_what_lies_beside_a_net_in_a_folder_called_onnx_counts_first(tmp_path: Path) -> None:
    inner = tmp_path / "onnx"
    inner.mkdir()
    folder_of(inner, class_to_idx=NUMBERED)
    (tmp_path / "class_to_idx.json").write_text(json.dumps(["other"] * 3))
    words = ["adopt", str(inner / "model.onnx"), "--preset", "torchvision", "-o", str(tmp_path / "adopted")]
    assert run(words) == 0
    assert [entry.name for entry in open_session(tmp_path / "adopted", "cpu").contract.classes] == THINGS


def test_a_file_of_a_development_version_that_squashed_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, class_to_idx=NUMBERED)
    assert run(["adopt", str(folder), "--preset", "torchvision", "-o", str(tmp_path / "adopted")]) == 0
    model = onnx.load(tmp_path / "adopted")
    model.metadata_props.add(key="prelunet.resize", value='"squash"')
    onnx.save(model, tmp_path / "old")
    with pytest.raises(ContractError, match=r"written by a development version\. Write the file again"):
        open_session(tmp_path / "old", "cpu")
