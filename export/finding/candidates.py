"""The preprocessing that people use, with its sources, question by question.

Sources: torchvision's weights and `transforms`; timm's `data/constants.py` and its table of published nets; Keras's
`applications` and `imagenet_utils`; TensorFlow's repository of EfficientNet-Lite; CLIP; Caffe's model zoo; Ultralytics;
transformers' image processors; OpenCV's samples of its module dnn.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ...evaluator.contract import center_scale
from ...evaluator.preparation import ANTIALIASED, FILTERS, Color, Resize, Rounding
from ...evaluator.protocols import EvaluationProtocol
from ...training.importing.preprocessing import USUAL_ELSEWHERE, Channels, Preprocessing

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

    @property
    def options(self) -> str:
        """Return the options of `prelunet adopt` that mean it, but for transformers' rounding, which has none."""
        own, preparation = self.preprocessing, self.preprocessing.preparation
        words = ["--channels", own.channels]
        for name, values in (("--mean", own.mean), ("--std", own.std)):
            if values is not None:
                words += [name, ",".join(f"{value:.8g}" for value in (values if len(set(values)) > 1 else values[:1]))]
        words += [] if own.mean is None else ["--range", str(own.pixel_range)]
        words += ["--resize", preparation.resize, "--scale", str(self.scale), "--interpolation", own.interpolation]
        words += ["--antialias", preparation.antialias]
        if preparation.resize == "pad":
            words += ["--pad-color", ",".join(map(str, preparation.pad_color))]
        return " ".join(words)


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
# Crops as parts of the resized shorter side: torchvision's weights, timm's crop_pct, and all of it (Ultralytics, CLIP).
_PARTS = (0.875, 0.9, 0.95, 224 / 232, 1.0)
_LARGEST = 1.35  # times the crop: of every scale, for outputs
_PADS = {"black": (0, 0, 0), "gray 114": (114,) * 3, "gray 128": (128,) * 3, "white": (255,) * 3,
         "ImageNet's mean": (124, 116, 104)}  # fmt: skip


def candidate_of(preprocessing: Preprocessing, crop: int, *, gray: bool, scale: int | None = None) -> Candidate:
    """Return a candidate. gray: the net takes images of one channel; scale: None for the usual one of the crop."""
    if gray:
        preparation = replace(preprocessing.preparation, gray=True)
        preprocessing = replace(preprocessing, channels="gray", preparation=preparation)
    if scale is None:
        whole = preprocessing.tight or preprocessing.preparation.whole
        scale = crop if whole else center_scale(crop)
    return Candidate(preprocessing, scale, crop)


def first_candidate(crop: int, *, gray: bool, takes_bytes: bool) -> Candidate:
    """Return the most usual way: torchvision's."""
    usual = candidate_of(Preprocessing(None, None, preparation=USUAL_ELSEWHERE), crop, gray=gray)
    return usual if takes_bytes else _normalized(usual, _NORMALIZATIONS["ImageNet's (torchvision, timm)"])


def options(question: Question, candidate: Candidate, *, exact: bool) -> dict[str, Candidate]:
    """Return the answers to a question, the rest being as in a candidate; none if there is nothing to ask.

    exact: also ways that differ too little for labels to tell, such as torch's filters from Pillow's.
    """
    return dict(_WAYS[question](candidate, exact))


def with_answer(question: Question, candidate: Candidate, other: Candidate) -> Candidate:
    """Return a candidate with another one's answer to a question."""
    own, wanted = candidate.preprocessing, other.preprocessing
    match question:
        case "channel order":
            return _in_order(candidate, wanted.channels)
        case "mean and std":
            numbers = {key: getattr(_in_order(other, own.channels).preprocessing, key) for key in _NUMBERS}
            return replace(candidate, preprocessing=replace(own, **numbers))
        case "geometry":
            changed = {key: getattr(wanted.preparation, key) for key in ("resize", "rounding", "pad_color")}
            preparation = replace(own.preparation, **changed)
            return replace(candidate, scale=other.scale, preprocessing=replace(own, preparation=preparation))
    preparation = replace(own.preparation, antialias=wanted.preparation.antialias)
    return replace(candidate, preprocessing=replace(own, interpolation=wanted.interpolation, preparation=preparation))


def _in_order(candidate: Candidate, channels: Channels) -> Candidate:
    """Return a candidate with the channels in another order, each with its own mean and std."""
    own = candidate.preprocessing
    if own.channels == channels or "gray" in {own.channels, channels}:
        return candidate
    mean, std = (None if each is None else each[::-1] for each in (own.mean, own.std))
    return replace(candidate, preprocessing=replace(own, channels=channels, mean=mean, std=std))


def _orders(candidate: Candidate, _exact: bool) -> Iterator[tuple[str, Candidate]]:
    if candidate.preprocessing.channels != "gray":
        yield "RGB", _in_order(candidate, "rgb")
        yield "BGR", _in_order(candidate, "bgr")


def _normalizations(candidate: Candidate, exact: bool) -> Iterator[tuple[str, Candidate]]:
    if candidate.preprocessing.mean is None:  # the net takes bytes
        return
    for name, normalization in _NORMALIZATIONS.items():
        if (name in _LIKE_IMAGENETS and not exact) or (name in _OF_SMALL_IMAGES and candidate.crop > _SMALL):
            continue
        yield name, _normalized(candidate, normalization)


def _normalized(candidate: Candidate, chosen: _Normalization) -> Candidate:
    own, mean, std = candidate.preprocessing, chosen.mean, chosen.std
    if own.channels == "bgr":
        mean, std = mean[::-1], std[::-1]
    elif own.channels == "gray":
        mean, std = (sum(mean) / 3,) * 3, (sum(std) / 3,) * 3
    changed = replace(own, mean=mean, std=std, pixel_range=chosen.largest)
    return replace(candidate, preprocessing=changed)


def _geometries(candidate: Candidate, exact: bool) -> Iterator[tuple[str, Candidate]]:
    crop, own = candidate.crop, candidate.preprocessing

    def changed(scale: int, resize: Resize, rounding: Rounding = "torchvision", color: Color = (0, 0, 0)) -> Candidate:
        preparation = replace(own.preparation, resize=resize, rounding=rounding, pad_color=color)
        return replace(candidate, scale=scale, preprocessing=replace(own, preparation=preparation))

    usual = center_scale(crop)
    scales = range(int(_LARGEST * crop), crop - 1, -1) if exact else [usual, *(int(crop / part) for part in _PARTS[1:])]
    for scale in scales:
        name = f"shorter side to {scale}, crop of {crop}"
        yield name, changed(scale, "shorter")
        if exact:
            yield f"{name}, rounded as transformers'", changed(scale, "shorter", "transformers")
    yield f"squashed to {crop}", changed(crop, "squash")
    yield f"squashed to {usual}, crop of {crop}", changed(usual, "squash")
    for name, color in _PADS.items():
        yield f"padded to {crop}, {name}", changed(crop, "pad", color=color)


def _filters(candidate: Candidate, exact: bool) -> Iterator[tuple[str, Candidate]]:
    own = candidate.preprocessing
    for antialias, interpolations in FILTERS.items():
        for interpolation in interpolations if exact or antialias != "torch" else ():
            preparation = replace(own.preparation, antialias=antialias)
            changed = replace(own, interpolation=interpolation, preparation=preparation)
            yield f"{interpolation}{ANTIALIASED[antialias]}", replace(candidate, preprocessing=changed)


_NUMBERS = ("mean", "std", "pixel_range")
_WAYS: Mapping[Question, Callable[[Candidate, bool], Iterator[tuple[str, Candidate]]]] = {
    "channel order": _orders,
    "mean and std": _normalizations,
    "geometry": _geometries,
    "filter": _filters,
}
QUESTIONS: tuple[Question, ...] = tuple(_WAYS)
