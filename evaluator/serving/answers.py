"""The answers of our own API in plain types, under both front ends.

They have the names and all the fields of proto/prelunet/v1: gRPC makes its messages of them, HTTP the JSON of /v1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ..answer import ClassMap, Prediction, Timings
from ..contract import ClassEntry
from ..engine.scores import shortest_decimal
from ..engine.session import Circumstances
from ..preparation import Preparation
from ..protocols import supported_protocols
from .repository import Version
from .scheduling.model import ServedModel
from .scheduling.request import Answered


class _Answer(Struct, forbid_unknown_fields=True):
    pass


class ModelIdentity(_Answer):
    """The model that answered. sha256: of its file; version: 1 for a model of the command line."""

    name: str
    sha256: str
    version: int


class Protocol(_Answer):
    """Which views of an image are classified, and how they are averaged.

    crop: unset for the whole image; preparation: unset where it is usual.
    """

    name: str
    kind: str
    scales: list[int]
    mirror: bool
    averaging: str
    weights: str
    long_side_cap: int
    interpolation: str
    apply_exif: bool
    crop: int | UnsetType = UNSET
    preparation: Preparation | UnsetType = UNSET


class WindowGrid(_Answer):
    """The number of windows of a view: rows times columns."""

    rows: int
    columns: int


class View(_Answer):
    """One view of the image that the model classified. scale: shorter side in pixels."""

    scale: int
    mirrored: bool
    part: str
    windows: WindowGrid


class ClassifyResponse(_Answer):
    """The best classes of one image, and how it was classified. heatmap: base64 of a PNG file, empty unless requested.

    predictions: best first; capped: whether a long side was cut to its center; maps: empty unless requested.
    """

    predictions: list[Prediction]
    model: ModelIdentity
    protocol: Protocol
    views: list[View]
    capped: bool
    circumstances: Circumstances
    heatmap: bytes
    timings: Timings
    maps: list[ClassMap]


class VersionProblem(_Answer):
    """What is wrong with a version of a model."""

    name: str
    version: int
    reason: str


class ListModelsResponse(_Answer):
    """The newest loaded version of each model, and what is wrong with versions in the server's folder."""

    models: list[ModelIdentity]
    problems: list[VersionProblem]


class Model(_Answer):
    """One model, and the device that runs it. The index of a class is its position; sides are in pixels."""

    name: str
    sha256: str
    architecture: str
    activation: str
    classes: tuple[ClassEntry, ...]
    crop: int
    default_scales: tuple[int, ...]
    max_side: int
    canvas: str
    circumstances: Circumstances
    checkpoint_sha256: str
    protocols: tuple[str, ...]
    version: int


def classify_response(answer: Answered) -> ClassifyResponse:
    """Return the answer to one image."""
    classes = answer.model.session.contract.classes
    return ClassifyResponse(
        predictions=[
            Prediction(index, classes[index].wnid, classes[index].name, shortest_decimal(score))
            for index, score in answer.classified.top(answer.plan.top)
        ],
        heatmap=answer.heatmap,
        timings=answer.timings,
        maps=[replace(each, scores=tuple(map(shortest_decimal, each.scores))) for each in answer.maps],
        **answer.constant_part(constant_part),
    )


def constant_part(answer: Answered) -> dict[str, Any]:
    """Return the fields of an answer that are equal for all images of the same plan and window grids."""
    protocol = answer.plan.protocol.to_json()
    crop = protocol.pop("crop")
    return {
        "model": _identity(answer.model),
        "protocol": Protocol(**protocol, crop=UNSET if crop is None else crop),
        "views": [View(**seen.view.to_json(), windows=WindowGrid(*seen.windows)) for seen in answer.classified.views],
        "capped": answer.classified.capped,
        "circumstances": answer.model.session.circumstances,
    }


def _identity(served: ServedModel) -> ModelIdentity:
    return ModelIdentity(served.name, served.session.model_sha256, served.version)


def list_models_response(models: Iterable[ServedModel], problems: Mapping[Version, str]) -> ListModelsResponse:
    """Return the list of models. problems: of versions in the server's folder."""
    return ListModelsResponse(
        [_identity(each) for each in models],
        [VersionProblem(version.name, version.number, reason) for version, reason in problems.items()],
    )


def model_response(served: ServedModel) -> Model:
    """Describe a served model."""
    contract, session = served.session.contract, served.session
    return Model(
        name=served.name,
        sha256=session.model_sha256,
        architecture=contract.name,
        activation=contract.architecture.activation,
        classes=contract.classes,
        crop=contract.crop,
        default_scales=contract.default_scales,
        max_side=contract.max_side,
        canvas=contract.canvas,
        circumstances=session.circumstances,
        checkpoint_sha256=contract.checkpoint_sha256,
        protocols=supported_protocols(contract),
        version=served.version,
    )
