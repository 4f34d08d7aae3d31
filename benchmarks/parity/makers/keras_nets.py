"""Nets of Keras, written by tf2onnx, with the two ways in which Keras reads image files; random weights but for one.

`image_dataset_from_directory` decodes and resizes in TensorFlow, `load_img` in Pillow.
"""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow
import tf2onnx
from keras import layers
from keras.utils import image_dataset_from_directory, img_to_array, load_img
from PIL import Image

from benchmarks.parity.images import SEED, picture
from benchmarks.parity.makers.net import CLASSES, SPREAD, Array, MakerNet, Pixels, Run, stated, two_classes

Read = Callable[[Path], Array]

SIDE = 96
RAW = "--mean 0 --std 1 --range 255"
JPEG = "TensorFlow decodes JPEG by a faster transform, so that pixels are up to 6 levels off"
CAFFE = (103.939, 116.779, 123.68)
IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def nets(folder: Path, images: Sequence[Path]) -> Iterator[MakerNet]:
    keras.utils.set_random_seed(1)
    for name, origin, net, read, words, facts in _described(folder, images):
        used = [image for image in images if image.name not in facts.get("left_out", ())]
        if not facts.pop("trained", False):
            _discriminating(net, np.concatenate([read(image) for image in used]))
        file = folder / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.onnx"
        signature = (tensorflow.TensorSpec((None, *net.input_shape[1:]), tensorflow.float32),)
        tf2onnx.convert.from_keras(net, input_signature=signature, opset=18, output_path=str(file))
        options = stated(words, CLASSES[: max(2, net.output_shape[-1])], file.with_suffix(".txt"))
        if facts.get("resizer") == "TensorFlow":
            facts["other"] = _runner(net, partial(_rounded, read))
        yield MakerNet(f"keras {name}", origin, file, _runner(net, read), options, **facts)


def _described(folder: Path, images: Sequence[Path]) -> Iterator[tuple[str, str, Any, Read, str, dict[str, Any]]]:
    """Yield name, what is to be seen, net, what reads an image, options, and further facts of each row."""
    apps = keras.applications
    yield (
        "convnet, dataset", "trained and read by image_dataset_from_directory: squashed in TensorFlow, not antialiased",
        _trained(_convnet(3, len(CLASSES)), folder / "train"), _of_dataset(folder, images),
        f"{RAW} --resize squash --antialias none",
        {
            "trained": True,
            "resizer": "TensorFlow", "pixels": Pixels(largest=255, layout="NHWC"),
            "left_out": {image.name: JPEG for image in images if image.suffix == ".jpg"},
            "wrong": ("--antialias pillow", "--interpolation bicubic"),
            "note": "Other: the same with resized pixels rounded to whole levels, which TensorFlow does not do.",
        },
    )  # fmt: skip
    yield (
        "convnet, mode tf", "read by load_img: nearest",
        _convnet(3, 10), partial(_loaded, apps.mobilenet.preprocess_input),
        "--preset keras-tf --resize squash --interpolation nearest",
        {
            "pixels": Pixels((0.5,) * 3, (0.5,) * 3, layout="NHWC"),
            "wrong": ("--interpolation bilinear", "--antialias none"),
        },
    )  # fmt: skip
    yield (
        "DenseNet121, mode torch", "read by load_img: bicubic",
        apps.DenseNet121(weights=None, classes=10, input_shape=(SIDE, SIDE, 3)),
        partial(_loaded, apps.densenet.preprocess_input, interpolation="bicubic"),
        "--preset torchvision --resize squash --interpolation bicubic", {"pixels": Pixels(**IMAGENET, layout="NHWC")},
    )  # fmt: skip
    yield (
        "convnet, mode caffe, one sigmoid", "read by load_img: bilinear",
        _convnet(3, 1), partial(_loaded, apps.resnet.preprocess_input, interpolation="bilinear"),
        "--preset keras-caffe --resize squash",
        {"pixels": Pixels(CAFFE, largest=255, channels="bgr", layout="NHWC"), "wrong": ("--channels rgb",)},
    )  # fmt: skip
    yield (
        "convnet, gray", "read by load_img: grayscale, nearest",
        _convnet(1, 10), partial(_loaded, lambda image: image, color_mode="grayscale"),
        f"{RAW} --resize squash --interpolation nearest",
        {"pixels": Pixels(largest=255, channels="gray", layout="NHWC"), "wrong": ("--interpolation bilinear",)},
    )  # fmt: skip


def _rounded(read: Read, image: Path) -> Array:
    return np.rint(read(image))


def _runner(net: Any, read: Read) -> Run:
    def run(image: Path) -> tuple[Array, Array]:
        values = read(image)
        scores = np.asarray(net(values, training=False))[0]
        return values, scores if len(scores) > 1 else two_classes(scores[0])

    return run


def _discriminating(net: Any, inputs: Array) -> None:
    """Let batch normalization take the inputs' statistics, and scale the last layer by class, as for torch's nets."""
    for layer in net.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = 0.0
    net(inputs, training=True)
    last = net.layers[-1]
    last.activation, activation = keras.activations.linear, last.activation
    answers = np.asarray(net(inputs, training=False))
    last.activation = activation
    kernel, bias = last.get_weights()
    factor = SPREAD / answers.std(0)
    last.set_weights([kernel * factor, (bias - answers.mean(0)) * factor])


def _convnet(channels: int, classes: int) -> Any:
    image = keras.Input((SIDE, SIDE, channels))
    x = layers.Rescaling(1 / 255)(image)
    for width in (16, 32, 64):
        x = layers.Conv2D(width, 3, strides=2, padding="same")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(classes, activation="softmax" if classes > 1 else "sigmoid")(x))


def _trained(net: Any, folder: Path) -> Any:
    """Train on class folders as Keras's tutorial does; half of each image is the same in all of its class."""
    random = np.random.default_rng(SEED)
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for image in range(30):
            width, height = map(int, random.integers(100, 300, 2))
            common = picture(np.random.default_rng([SEED, number]), width, height).astype(np.uint16)
            pixels = (common + picture(random, width, height)) // 2
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{image}.png")
    data = image_dataset_from_directory(folder, image_size=(SIDE, SIDE), seed=SEED, verbose=False)
    net.compile("adam", "sparse_categorical_crossentropy")
    net.fit(data, epochs=30, verbose=0)
    return net


def _loaded(preprocess: Callable[[Array], Array], image: Path, **options: Any) -> Array:
    return np.asarray(preprocess(img_to_array(load_img(image, target_size=(SIDE, SIDE), **options))[None]))


def _of_dataset(folder: Path, images: Sequence[Path]) -> Read:
    read = {}
    for image in images:
        if image.suffix != ".jpg":
            alone = folder / "dataset" / image.stem
            alone.mkdir(parents=True)
            shutil.copy(image, alone)
            data = image_dataset_from_directory(
                alone, labels=None, image_size=(SIDE, SIDE), batch_size=1, verbose=False
            )
            read[image] = np.asarray(next(iter(data)))
    return lambda image: read[image]
