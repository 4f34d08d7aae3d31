"""Nets with other preparations than ours, from the command line to the scores: against Pillow, torch, onnxruntime."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import prelunet
from prelunet.evaluator.cli import run
from prelunet.evaluator.client import Client
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.heatmap import heat_maps
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.serving.options import HttpOptions
from tests.export.foreign.foreign_nets import (
    CLASSES,
    CROP,
    Build,
    NetBuilder,
    features,
    net,
    of_gray,
    photo,
    write_classes,
)
from tests.serving.serving_harness import running_server

# As in test_adopt.py: only the order of sums inside the net may differ.
TOLERANCE = 1e-6


def transparent(height: int, width: int) -> bytes:
    pixels = np.random.default_rng(5).integers(0, 256, (height, width, 4), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


FILES = {"a.png": photo(61, 83, "PNG"), "b.jpg": photo(97, 52, "JPEG", seed=1), "c.png": transparent(45, 70)}


def of_gray_last(n: NetBuilder, x: str) -> str:
    return of_gray(n, n.add("Transpose", x, perm=[0, 3, 1, 2]))


def one_gray(n: NetBuilder, x: str) -> str:
    """Flatten with the batch size as a constant, so that images run one at a time."""
    gray = n.add("Conv", x, n.weights(3, 1, 3, 3), kernel_shape=[3, 3], pads=[1] * 4)
    return features(n, gray, lambda n, x: n.add("Reshape", x, n.constant(np.array([1, 12], np.int64))))


def pillow(mode: str, size: Callable[[Image.Image], tuple[int, int]], filter_: Image.Resampling) -> Callable[..., Any]:
    """Convert, resize, and cut out the center as torchvision does."""

    def prepared(image: Image.Image) -> np.ndarray:
        image = image.convert(mode)
        image = image.resize(size(image), filter_)
        left, top = (round((side - CROP) / 2.0) for side in image.size)
        return np.asarray(image.crop((left, top, left + CROP, top + CROP)))

    return prepared


def shorter(scale: int) -> Callable[[Image.Image], tuple[int, int]]:
    def size(image: Image.Image) -> tuple[int, int]:
        short = min(image.size)
        return int(scale * image.width / short), int(scale * image.height / short)

    return size


def square(_image: Image.Image) -> tuple[int, int]:
    return CROP, CROP


def padded(image: Image.Image) -> np.ndarray:
    image = image.convert("RGB")
    long = max(image.size)
    small = image.resize([round(side * CROP / long) for side in image.size], Image.Resampling.BICUBIC)
    canvas = Image.new("RGB", (CROP, CROP), (114, 7, 0))
    canvas.paste(small, tuple((CROP - side) // 2 for side in small.size))
    return np.asarray(canvas)


def by_torch(image: Image.Image) -> np.ndarray:
    planes = torch.from_numpy(np.asarray(image.convert("RGB")).transpose(2, 0, 1)[None].astype(np.float32))
    small = torch.nn.functional.interpolate(planes, (CROP, CROP), mode="bilinear", align_corners=False)
    return small.round().numpy()[0].transpose(1, 2, 0).astype(np.uint8)


def by_torchs_bytes(image: Image.Image) -> np.ndarray:
    planes = torch.from_numpy(np.asarray(image.convert("RGB")).transpose(2, 0, 1)[None].copy())
    small = torch.nn.functional.interpolate(planes, (CROP, CROP), mode="bilinear", antialias=True)
    return small.numpy()[0].transpose(1, 2, 0)


BILINEAR, BICUBIC, NEAREST = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.NEAREST
HALF = ["--mean", "0.5", "--std", "0.25"]
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
USUAL = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# name → how the net is built and written, options of adopt, pixels without prelunet, mean and std
CASES: dict[str, tuple[Build, dict[str, Any], list[str], Callable[[Image.Image], np.ndarray], Any, Any]] = {
    "gray": (of_gray, {"shape": ["N", 1, CROP, CROP]}, HALF, pillow("L", shorter(46), BILINEAR), 0.5, 0.25),
    "gray, channels last": (
        of_gray_last, {"shape": ["N", CROP, CROP, 1]}, HALF, pillow("L", shorter(46), BILINEAR), 0.5, 0.25
    ),
    "gray, one at a time": (
        one_gray, {"shape": [1, 1, CROP, CROP]}, HALF, pillow("L", shorter(46), BILINEAR), 0.5, 0.25
    ),
    "gray in three channels": (
        features, {}, [*HALF, "--channels", "gray"], pillow("L", shorter(46), BILINEAR), 0.5, 0.25
    ),
    "gray in three channels, normalized as colors": (
        features, {}, ["--preset", "torchvision", "--channels", "gray"], pillow("L", shorter(46), BILINEAR), *USUAL
    ),
    "padded": (
        features, {}, [*HALF, "--resize", "pad", "--pad-color", "114,7,0", "--interpolation", "bicubic"], padded, 0.5,
        0.25,
    ),
    "not antialiased": (features, {}, [*HALF, "--resize", "squash", "--antialias", "none"], by_torch, 0.5, 0.25),
    "nearest": (
        features, {}, [*HALF, "--resize", "squash", "--interpolation", "nearest"], pillow("RGB", square, NEAREST), 0.5,
        0.25,
    ),
    "torchvision": (features, {}, ["--preset", "torchvision"], pillow("RGB", shorter(46), BILINEAR), *USUAL),
    "another scale": (
        features, {}, ["--preset", "timm", "--scale", "49"], pillow("RGB", shorter(49), BICUBIC), *USUAL
    ),
    "squashed and cropped": (
        features, {}, [*HALF, "--resize", "squash", "--scale", "47", "--interpolation", "lanczos"],
        pillow("RGB", lambda _image: (47, 47), Image.Resampling.LANCZOS), 0.5, 0.25,
    ),
    "clip": (features, {}, ["--preset", "clip"], pillow("RGB", shorter(CROP), BICUBIC), *CLIP),
    "ultralytics": (features, {}, ["--preset", "ultralytics"], pillow("RGB", shorter(CROP), BILINEAR), 0.0, 1.0),
    "hf-vit": (features, {}, ["--preset", "hf-vit"], by_torchs_bytes, 0.5, 0.5),
}  # fmt: skip


def validate(folder: Path, model: Path, files: dict[str, bytes]) -> None:
    """Evaluate images of one class into `run`."""
    data = folder / "data" / "n00000003"
    data.mkdir(parents=True)
    for file, content in files.items():
        (data / file).write_bytes(content)
    words = ["validate", "--model", str(model), "--data", str(folder / "data"), "--run", str(folder / "run")]
    assert run(words) == 0


@pytest.mark.parametrize("name", CASES)
def test_a_net_sees_the_images_that_its_makers_made(name: str, tmp_path: Path) -> None:
    build, written, options, prepare, mean, std = CASES[name]
    path, model = net(tmp_path, build, **written), tmp_path / "adopted"
    classes = ["--classes", str(write_classes(tmp_path))]
    assert run(["adopt", str(path), *classes, *options, "-o", str(model)]) == 0
    validate(tmp_path, model, FILES)

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (x,) = session.get_inputs()

    def scores(content: bytes) -> np.ndarray:
        pixels = prepare(Image.open(io.BytesIO(content))).astype(np.float32) / np.float32(255)
        pixels = np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels
        values = ((pixels - np.float32(mean)) / np.float32(std)).transpose(2, 0, 1)[None]
        values = values[:, :1] if 1 in x.shape[1:] else values
        logits = session.run(None, {x.name: values.transpose(0, 2, 3, 1) if x.shape[3] == 1 else values})[0]
        powers = np.exp(logits.astype(np.float64).reshape(-1) - logits.max())
        return powers / powers.sum()

    wanted = np.stack(list(map(scores, FILES.values())))
    assert wanted.shape == (3, CLASSES)
    assert np.abs(wanted[0] - wanted[1]).max() > 0.01, "a net that says the same of all images shows nothing"
    np.testing.assert_allclose(np.load(tmp_path / "run" / "scores.f32.npy"), wanted, rtol=0, atol=TOLERANCE)
    run_json = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run_json["protocol"]["preparation"]["transparency"] == "dropped"
    assert run_json["protocol"]["preparation"]["gray"] == ("gray" in name)


@pytest.mark.parametrize(
    ("build", "shape", "options", "message"),
    [
        (of_gray, ["N", 1, CROP, CROP], ["--preset", "torchvision"], "takes gray images. Give one number as --mean"),
        (of_gray, ["N", 1, CROP, CROP], [*HALF, "--channels", "bgr"], "takes gray images, which have one channel"),
        (features, None, [*HALF, "--pad-color", "0"], "--pad-color is of --resize pad"),
        (features, None, [*HALF, "--resize", "pad", "--pad-color", "0,0,256"], "should be whole numbers from 0 to 255"),
        (
            features,
            None,
            [*HALF, "--interpolation", "lanczos", "--antialias", "none"],
            "lanczos is not supported with antialias none",
        ),
        (
            features,
            None,
            [*HALF, "--scale", "39"],
            "crops of 40 need from 40 to 640. Give the scale of this crop with --scale",
        ),
        (features, None, [*HALF, "--resize", "pad", "--dense"], "--resize pad with --dense: a net that takes whole"),
    ],
)
def test_options_that_contradict_the_net_are_refused(
    build: Build, shape: Any, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = net(tmp_path, build, shape=shape)
    words = ["adopt", str(path), "--classes", str(write_classes(tmp_path)), *options, "-o", str(tmp_path / "adopted")]
    assert run(words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "adopted").exists()


def rotated(height: int, width: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.open(io.BytesIO(photo(height, width, "PNG", seed=3))).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def saved(pixels: Image.Image, encoding: str) -> bytes:
    buffer = io.BytesIO()
    pixels.save(buffer, encoding)
    return buffer.getvalue()


DEEP = np.random.default_rng(8).integers(0, 2**16, (50, 61), dtype=np.uint16)
TRAITS = {
    "alpha.png": (transparent(45, 70), ["alpha"]),
    "cmyk.jpg": (saved(Image.open(io.BytesIO(FILES["a.png"])).convert("CMYK"), "JPEG"), ["cmyk"]),
    "deep.png": (saved(Image.fromarray(DEEP), "PNG"), ["16-bit"]),
    "plain.jpg": (FILES["b.jpg"], None),
    "rotated.jpg": (rotated(44, 60), ["rotated"]),
}


def test_a_run_counts_what_files_have_that_nets_see_in_different_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model, folder = net(tmp_path), tmp_path / "adopted", tmp_path / "run"
    words = ["adopt", str(path), "--classes", str(write_classes(tmp_path)), "--preset", "torchvision"]
    assert run([*words, "-o", str(model)]) == 0
    said = (
        "1 with an alpha channel (dropped), 1 of 16 bits (the upper 8 count), 1 CMYK (converted without color "
        "profiles), 1 rotated by EXIF (ignored)"
    )
    capsys.readouterr()
    validate(tmp_path, model, {file: content for file, (content, _) in TRAITS.items()})
    assert f"images: {said}\n" in capsys.readouterr().err
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert [line.get("traits") for line in lines] == [traits for _, traits in TRAITS.values()]
    assert run(["report", str(folder)]) == 0
    report = json.loads((folder / "report" / "report.json").read_text())
    assert report["traits"] == {"alpha": 1, "16-bit": 1, "cmyk": 1, "rotated": 1}
    assert said in (folder / "report" / "report.html").read_text()


def test_server_python_and_heat_maps_see_the_same_images_as_validate(tmp_path: Path) -> None:
    path, model = net(tmp_path, of_gray, shape=["N", 1, CROP, CROP]), tmp_path / "adopted"
    options = [*HALF, "--resize", "pad", "--pad-color", "9", "--antialias", "none", "--interpolation", "bicubic"]
    assert run(["adopt", str(path), "--classes", str(write_classes(tmp_path)), *options, "-o", str(model)]) == 0
    validate(tmp_path, model, FILES)
    wanted = np.load(tmp_path / "run" / "scores.f32.npy")
    adopted, session = prelunet.load(model), open_session(model, "cpu")
    with running_server(ours=session, http=HttpOptions(port=0)) as server, Client(server.address) as client:
        for content, row in zip(FILES.values(), wanted, strict=True):
            best, score = int(row.argmax()), float(row.max())
            answer = client.classify(content)
            over_http = httpx.post(f"http://{server.http}/v1/classify", content=content).json()
            in_python = adopted.classify(content)
            assert answer.protocol == over_http["protocol"]
            for found in (answer.predictions[0], in_python.predictions[0]):
                assert (found.class_index, found.score) == (best, pytest.approx(score, abs=TOLERANCE))
            assert over_http["predictions"][0]["score"] == pytest.approx(score, abs=TOLERANCE)

    protocol = build_protocol("center", session.contract)
    image = np.asarray(decode_image(FILES["a.png"], preparation=protocol.preparation))
    (result,) = classify_images(session, [image], protocol, keep_windows=True)
    (found,) = heat_maps(result, [2], (61, 83), (10, 14), session.contract, protocol)
    # The only window covers all of the image, whose border lies outside of it.
    np.testing.assert_allclose(found, np.full((10, 14), result.scores[2]), rtol=1e-6)
