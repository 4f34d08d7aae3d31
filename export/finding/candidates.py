"""The preprocessing that people use, with its sources, question by question.

Sources: torchvision's weights and `transforms`; timm's `data/constants.py` and its table of published nets; Keras's
`applications` and `imagenet_utils`; TensorFlow's repository of EfficientNet-Lite; CLIP; Caffe's model zoo; Ultralytics;
transformers' image processors; OpenCV's samples of its module dnn.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ...evaluator.preparation import Antialias, Interpolation
from ...evaluator.protocols import EvaluationProtocol
from ...training.importing.preprocessing import USUAL_ELSEWHERE, Preprocessing

Question = Literal["channel order", "mean and std", "geometry", "filter"]


@dataclass(frozen=True)
class Candidate:
    """One way to make a net's input of an image file. scale: pixels of the resized side before the central crop."""

    preprocessing: Preprocessing
    scale: int
    crop: int

    @property
    def protocol(self) -> EvaluationProtocol:
        """Return the protocol `center` with these pixels."""
        preprocessing = self.preprocessing
        return EvaluationProtocol(
            "center", "center", (self.scale,), mirror=False, crop=self.crop,
            interpolation=preprocessing.interpolation, preparation=preprocessing.preparation,
        )  # fmt: skip


class _Normalization(NamedTuple):
    """Of red, green and blue; largest: value of a pixel when the mean is subtracted."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    largest: int


_ONE, _HALF, _NONE = (1.0,) * 3, (0.5,) * 3, (0.0,) * 3
_NORMALIZATIONS: Mapping[str, _Normalization] = {
    "ImageNet's (torchvision, timm)": _Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 1),
    "0.5 and 0.5 (timm's ViTs, Keras's mode tf, transformers)": _Normalization(_HALF, _HALF, 1),
    "pixels from 0 to 1 (Ultralytics)": _Normalization(_NONE, _ONE, 1),
    "pixels from 0 to 255 (nets that normalize themselves, Keras's EfficientNet)": _Normalization(_NONE, _ONE, 255),
    "127 and 128 (EfficientNet-Lite)": _Normalization((127.0,) * 3, (128.0,) * 3, 255),
    "Caffe's mean (Keras's mode caffe)": _Normalization((123.68, 116.779, 103.939), _ONE, 255),
    "Caffe's mean and 1/0.017 (Caffe's MobileNet)": _Normalization((123.68, 116.78, 103.94), (58.8235,) * 3, 255),
    "128 (OpenCV's and older Caffe nets)": _Normalization((128.0,) * 3, _ONE, 255),
    "CLIP's": _Normalization((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), 1),
    "CIFAR-10's": _Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 1),
    "CIFAR-100's": _Normalization((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), 1),
    "MNIST's": _Normalization((0.1307,) * 3, (0.3081,) * 3, 1),
}
_LIKE_IMAGENETS = ("Caffe's mean and 1/0.017 (Caffe's MobileNet)",)  # up to 3 % of contrast: only outputs tell
_OF_SMALL_IMAGES, _SMALL = ("CIFAR-10's", "CIFAR-100's", "MNIST's"), 48  # pixels of a crop
# Crops as parts of the resized shorter side: torchvision's first weights 224/256 and its later ones 224/232, timm's
# crop_pct, and all of it (Ultralytics, CLIP).
_PARTS = (224 / 256, 0.9, 0.95, 224 / 232, 1.0)
_PADS = {"black": 0, "gray 114": 114, "white": 255}
_SQUASHED_BEFORE_CROP = 224 / 256
_FILTERS: tuple[tuple[Interpolation, Antialias], ...] = (
    *(("bilinear", "pillow"), ("bicubic", "pillow"), ("lanczos", "pillow"), ("nearest", "pillow")),
    *(("nearest", "none"), ("bilinear", "none"), ("bicubic", "none")),
)
_TENSORS: tuple[tuple[Interpolation, Antialias], ...] = (("bilinear", "torch"), ("bicubic", "torch"))
_WRITTEN: Mapping[Antialias, str] = {"pillow": "", "torch": ", as torch's on tensors", "none": ", not antialiased"}


def first_candidate(crop: int, *, gray: bool) -> Candidate:
    """Return the most usual way: torchvision's."""
    preparation = replace(USUAL_ELSEWHERE, gray=gray)
    usual = _normalized(Preprocessing(None, None, preparation=preparation), "gray" if gray else "rgb", "ImageNet's")
    return Candidate(usual, _scale(crop, _PARTS[0]), crop)


def options(question: Question, candidate: Candidate, *, exact: bool) -> dict[str, Candidate]:
    """Return the answers to a question, the rest being as in a candidate. The first of equal ones counts.

    exact: also ways that differ too little for labels to tell, such as torch's filters from Pillow's.
    """
    return dict(_WAYS[question](candidate, exact))


def _orders(candidate: Candidate, _exact: bool) -> Iterator[tuple[str, Candidate]]:
    own = candidate.preprocessing
    if own.channels == "gray":
        return
    for channels in ("rgb", "bgr"):
        turned = own.channels != channels
        mean, std = (None if each is None else each[::-1] if turned else each for each in (own.mean, own.std))
        yield channels.upper(), replace(candidate, preprocessing=replace(own, channels=channels, mean=mean, std=std))


def _normalizations(candidate: Candidate, exact: bool) -> Iterator[tuple[str, Candidate]]:
    own = candidate.preprocessing
    for name in _NORMALIZATIONS:
        if (name in _LIKE_IMAGENETS and not exact) or (name in _OF_SMALL_IMAGES and candidate.crop > _SMALL):
            continue
        yield name, replace(candidate, preprocessing=_normalized(own, own.channels, name))


def _normalized(own: Preprocessing, channels: Literal["rgb", "bgr", "gray"], name: str) -> Preprocessing:
    chosen = next(each for key, each in _NORMALIZATIONS.items() if key.startswith(name))
    mean, std = chosen.mean, chosen.std
    if channels == "bgr":
        mean, std = mean[::-1], std[::-1]
    elif channels == "gray":
        mean, std = (sum(mean) / 3,) * 3, (sum(std) / 3,) * 3
    return replace(own, channels=channels, mean=mean, std=std, pixel_range=chosen.largest)


def _geometries(candidate: Candidate, exact: bool) -> Iterator[tuple[str, Candidate]]:
    crop, own = candidate.crop, candidate.preprocessing
    roundings = ("torchvision", "transformers") if exact else ("torchvision",)

    def changed(name: str, scale: int, **values: Any) -> tuple[str, Candidate]:
        preparation = replace(own.preparation, **{"rounding": "torchvision", **values})
        return name, replace(candidate, scale=scale, preprocessing=replace(own, preparation=preparation))

    for rounding in roundings:
        note = "" if rounding == "torchvision" else ", rounded as transformers'"
        for part in _PARTS:
            scale = _scale(crop, part)
            name = f"shorter side to {scale}, crop of {crop}{note}"
            yield changed(name, scale, resize="shorter", rounding=rounding)
    yield changed(f"squashed to {crop}", crop, resize="squash")
    scale = _scale(crop, _SQUASHED_BEFORE_CROP)
    yield changed(f"squashed to {scale}, crop of {crop}", scale, resize="squash")
    for name, level in _PADS.items():
        yield changed(f"padded to {crop}, {name}", crop, resize="pad", pad_color=(level,) * 3)


def _filters(candidate: Candidate, exact: bool) -> Iterator[tuple[str, Candidate]]:
    own = candidate.preprocessing
    for interpolation, antialias in (*_FILTERS, *(_TENSORS if exact else ())):
        preparation = replace(own.preparation, antialias=antialias)
        changed = replace(own, interpolation=interpolation, preparation=preparation)
        yield f"{interpolation}{_WRITTEN[antialias]}", replace(candidate, preprocessing=changed)


def _scale(crop: int, part: float) -> int:
    return int(crop / part)


_WAYS: Mapping[Question, Callable[[Candidate, bool], Iterator[tuple[str, Candidate]]]] = {
    "channel order": _orders,
    "mean and std": _normalizations,
    "geometry": _geometries,
    "filter": _filters,
}
QUESTIONS: tuple[Question, ...] = tuple(_WAYS)
