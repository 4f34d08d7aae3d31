"""The run folder: one validation of one model on one dataset with one protocol (docs/formats.md, "Run folder")."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, convert

from ..contract import (
    MAX_NAME_LENGTH,
    ClassEntry,
    Provenance,
    Sha256,
    parse_calibration,
    parse_provenance,
)
from ..datasets.dataset import UNLABELLED, Dataset
from ..engine.batching import BatchRules
from ..engine.memory import portion_size
from ..engine.session import Session
from ..errors import RunFolderError, UsageError
from ..files import OpenFile, open_regular
from ..json_checks import parse_json
from ..protocols import EvaluationProtocol, View, protocol_from_json
from ..terminal import escape_unprintable
from .predictions import Prediction, read_predictions

RUN_VERSION = 3
MAX_SHARDS = 999_999
CHUNK = 64  # images; the unit of writing, resuming and sharding
GPU_CHUNK = 1024  # images; enough batches per canvas shape to amortize switching shapes
RESTRICTION_FIX = "Validate both with the same --restrict-classes."
RUN_FILE, PREDICTIONS_FILE, SCORES_FILE = "run.json", "predictions.jsonl", "scores.f32.npy"
HEAT_MAPS_FILE = "heatmaps.jsonl"  # optional


@dataclass(frozen=True)
class Batching:
    """Which images were computed together. The last bits of a score may depend on it.

    images_together: images per portion of a chunk, which are prepared and computed together; rules: for planning the
    batches of each portion.
    """

    images_together: int
    rules: BatchRules

    def to_json(self) -> dict[str, int]:
        return {"images_together": self.images_together, **self.rules.to_json()}


@dataclass(frozen=True)
class RunInfo:
    """The content of run.json: everything that determines the results and nothing else (no dates, no paths)."""

    model: Mapping[
        str, Any
    ]  # file, sha256, architecture, activation, provenance, checkpoint_sha256, calibration if the file is int8
    classes: tuple[ClassEntry, ...]
    protocol: EvaluationProtocol
    dataset: Mapping[str, Any]  # name, fingerprint, images, layout, selection, restriction if there is one
    circumstances: Mapping[str, Any]  # provider, precision, versions
    batching: Batching | None = None  # None for an ensemble, which averages stored scores
    chunk: int = CHUNK
    shard: tuple[int, int] | None = None  # number (from 1) and count; None for the whole dataset
    members: tuple[Mapping[str, Any], ...] = ()  # of an ensemble: model and weight of each

    @property
    def views(self) -> tuple[View, ...]:
        """Return the views whose ranks are in each line; none for an ensemble, which only has their average."""
        return () if self.members else self.protocol.views

    @property
    def candidates(self) -> tuple[int, ...] | None:
        """Return the class indices among which predictions are made, None for all."""
        restriction = self.dataset.get("restriction")
        return None if restriction is None else tuple(restriction["classes"])

    @property
    def span(self) -> tuple[int, int]:
        """Return first and last + 1 of this run's images in the dataset: all, or the whole chunks of a shard."""
        images: int = self.dataset["images"]
        if self.shard is None:
            return 0, images
        number, of = self.shard
        chunks = -(-images // self.chunk)
        return min((number - 1) * chunks // of * self.chunk, images), min(number * chunks // of * self.chunk, images)

    @property
    def images(self) -> int:
        first, end = self.span
        return end - first

    def to_json(self) -> dict[str, Any]:
        """Return run.json as plain data."""
        return {
            "version": RUN_VERSION,
            "model": dict(self.model),
            "classes": [entry.to_json() for entry in self.classes],
            "protocol": self.protocol.to_json(),
            "dataset": dict(self.dataset),
            "circumstances": dict(self.circumstances),
            "batching": self.batching and self.batching.to_json(),
            "chunk": self.chunk,
            "shard": self.shard and {"number": self.shard[0], "of": self.shard[1]},
            "views": [view.to_json() for view in self.views],
            "members": [dict(member) for member in self.members],
        }


def build_run_info(
    session: Session,
    model_file: str,
    dataset: Mapping[str, Any],
    protocol: EvaluationProtocol,
    shard: tuple[int, int] | None = None,
    *,
    memory: int | None = None,
) -> RunInfo:
    """Describe a run of this session.

    model_file: last path component; dataset: from `describe_dataset`; memory: limit for the process in bytes
    (`portion_size`), None for the default.
    """
    contract = session.contract
    model = {
        "file": sanitize_name(model_file),
        "sha256": session.model_sha256,
        "architecture": contract.name,
        "activation": sanitize_name(contract.architecture.activation),
        "provenance": contract.training.get("provenance"),
        "checkpoint_sha256": contract.checkpoint_sha256,
        **({} if contract.calibration is None else {"calibration": contract.calibration.to_json()}),
    }
    gpu = session.circumstances.on_gpu
    chunk = GPU_CHUNK if gpu else CHUNK
    batching = Batching(portion_size(protocol, chunk, memory, gpu=gpu), session.rules)
    circumstances = session.circumstances.to_json()
    return RunInfo(model, contract.classes, protocol, dataset, circumstances, batching, chunk, shard)


def sanitize_name(name: str) -> str:
    """Make a name acceptable in run.json: escape unprintable characters, and truncate it if it is too long."""
    shown = escape_unprintable(name)
    return shown if len(shown) <= MAX_NAME_LENGTH else f"{shown[: MAX_NAME_LENGTH - 3]}..."


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Return the description of a dataset for run.json."""
    return {
        "name": sanitize_name(dataset.location.name),
        "fingerprint": dataset.fingerprint,
        "images": len(dataset.samples),
        "layout": sanitize_name(dataset.layout),  # may contain the name of a label file
        "selection": dataset.selection,
        **({} if dataset.restriction is None else {"restriction": dataset.restriction}),
    }


@dataclass(frozen=True)
class Run:
    """A run that can be reported on. folder: where it is stored, None for a run in a server's memory."""

    info: RunInfo
    predictions: Sequence[Prediction]
    folder: Path | None = None

    @property
    def has_labels(self) -> bool:
        """Return whether any true class is known, so that errors can be counted."""
        return any(prediction.label != UNLABELLED for prediction in self.predictions)

    @property
    def where(self) -> str:
        """Return the name of the run for messages: its folder, or the model file of a run in memory."""
        return str(self.folder or self.info.model["file"])


def require_unsharded(info: RunInfo, where: str | Path) -> None:
    """Refuse a shard with RunFolderError, where results must cover the whole dataset. where: for the message."""
    if info.shard is not None:
        raise RunFolderError(
            f"{where}: shard {info.shard[0]} of {info.shard[1]}, not a complete run. Merge all shards first: "
            "prelunet merge SHARD... --run DIR"
        )


def require_labels(run: Run) -> None:
    """Refuse a run with images of unknown class, whose errors cannot be counted. Raises UsageError."""
    if unknown := sum(prediction.label == UNLABELLED for prediction in run.predictions):
        raise UsageError(
            f"{run.where}: the true class of {unknown:,} of {len(run.predictions):,} images is unknown, so errors "
            "cannot be counted. Validate on labeled images. To write the predictions for unlabeled images, run: "
            "prelunet classify IMAGES --model MODEL --csv FILE, or, for ILSVRC's server: "
            f"prelunet submission {run.where}"
        )


def require_same_images(one: Run, other: Run) -> None:
    """Refuse runs whose lines differ in image or label. Raises RunFolderError.

    For runs with equal fingerprints: a difference means that one of them was changed.
    """
    for number, (a, b) in enumerate(zip(one.predictions, other.predictions, strict=True), start=1):
        if (a.file, a.labels) != (b.file, b.labels):
            here, there = (
                f"{escape_unprintable(line.file[:100])} (label {', '.join(map(str, line.labels))})" for line in (a, b)
            )
            raise RunFolderError(
                f"line {number} of the predictions is {here} in {one.where}, but {there} in {other.where}, although "
                "their fingerprints are equal: one of them is damaged. Restore its predictions.jsonl, or repeat that "
                "run with --fresh"
            )


_Count = Annotated[int, Meta(ge=1)]
_Text = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]


class _Part(Struct, forbid_unknown_fields=True):
    """A part of run.json, as `RunInfo.to_json` writes it."""


class _Model(_Part):
    file: _Text
    sha256: Sha256
    architecture: _Text
    activation: _Text
    provenance: Provenance | None = None
    checkpoint_sha256: Sha256 | None = None
    calibration: dict[str, Any] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.calibration is not UNSET:
            parse_calibration(self.calibration)


class _Class(_Part):
    wnid: _Text
    name: _Text


class _Restriction(_Part):
    name: _Text
    classes: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=2)]


class _Dataset(_Part):
    name: _Text
    fingerprint: Sha256
    images: _Count
    layout: _Text
    selection: _Text | None
    restriction: _Restriction | UnsetType = UNSET


class _Circumstances(_Part):
    provider: _Text
    precision: _Text
    versions: dict[_Text, _Text]


class _Shard(_Part):
    number: _Count
    of: Annotated[int, Meta(ge=1, le=MAX_SHARDS)]


class _Member(_Part):
    model: _Model
    weight: Annotated[float, Meta(gt=0, le=1)]


class _RunFile(_Part):
    version: _Count
    model: _Model
    classes: Annotated[tuple[_Class, ...], Meta(min_length=1)]
    protocol: dict[str, Any]  # checked by `protocol_from_json`
    dataset: _Dataset
    circumstances: _Circumstances
    batching: dict[str, int] | None
    chunk: _Count
    shard: _Shard | None
    views: list[dict[str, Any]]
    members: tuple[_Member, ...]


def run_info_from_json(data: Any) -> RunInfo:
    """Parse run.json. Raises ValueError or UsageError with the fault."""
    run = convert(data, _RunFile)
    for model in (data["model"], *(member["model"] for member in data["members"])):
        model["provenance"] = parse_provenance(model.get("provenance"))  # absent in runs of earlier versions
        model.setdefault("checkpoint_sha256", None)  # likewise
    for name in (run.model.file, run.dataset.name, *(member.model.file for member in run.members)):
        if "/" in name:
            raise ValueError(f"{name[:100]!r} should be a name without folders")
    if isinstance(run.dataset.restriction, _Restriction):
        indices = run.dataset.restriction.classes
        if indices != sorted(set(indices)) or indices[-1] >= len(run.classes):
            raise ValueError("dataset.restriction.classes should be ascending indices of the run's classes")
    batching = None
    if run.batching is not None:
        images_together = run.batching.pop("images_together", 0)
        if images_together < 1:
            raise ValueError("batching.images_together should be at least 1")
        batching = Batching(images_together, BatchRules.from_json(run.batching))
    if run.shard is not None and run.shard.number > run.shard.of:
        raise ValueError(f"shard.number should be at most {run.shard.of}, not {run.shard.number}")
    info = RunInfo(
        model=data["model"],
        classes=tuple(ClassEntry(entry.wnid, entry.name) for entry in run.classes),
        protocol=protocol_from_json(data["protocol"]),
        dataset=data["dataset"],
        circumstances=data["circumstances"],
        batching=batching,
        chunk=run.chunk,
        shard=None if run.shard is None else (run.shard.number, run.shard.of),
        members=tuple(data["members"]),
    )
    if run.views != [view.to_json() for view in info.views]:
        raise ValueError("views should be those of the protocol, in its order, or empty for an ensemble")
    return info


class _AnyVersion(Struct):
    version: _Count


_KEYS_OF_ANY_VERSION = {"version", "model", "protocol"}


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder contains a run, judged by its run.json. The run may be damaged or of another version."""
    try:
        data = parse_json(_bytes_of(folder / RUN_FILE))
    except (OSError, ValueError):
        return False
    return type(data) is dict and data.keys() >= _KEYS_OF_ANY_VERSION


def read_run_info(folder: Path, open_file: OpenFile = open_regular) -> RunInfo:
    """Read run.json of a folder. Raises RunFolderError when it is missing or cannot be read."""
    path = folder / RUN_FILE
    try:
        data = parse_json(_bytes_of(path, open_file))
        version = convert(data, _AnyVersion).version
        if version == RUN_VERSION:
            return run_info_from_json(data)
    except OSError as error:
        raise RunFolderError(
            f"{folder}: no {RUN_FILE} in this folder ({error.strerror}). Create a run with: "
            f"prelunet validate --model MODEL.onnx --data DIR --protocol P --run {folder}"
        ) from error
    except (ValueError, UsageError) as error:
        restart = "start over with --fresh" if is_run_folder(folder) else "repeat the run in another folder"
        raise RunFolderError(f"{path}: damaged ({error}). Restore the file, or {restart}") from error
    fix = "Install a newer prelunet" if version > RUN_VERSION else "Repeat the run with --fresh"
    raise RunFolderError(f"{path}: version {version}, but this prelunet reads version {RUN_VERSION}. {fix}")


def _bytes_of(path: Path, open_file: OpenFile = open_regular) -> bytes:
    with open_file(path) as file:
        return file.read()


def read_run(folder: Path) -> Run:
    """Read a finished run.

    Raises RunFolderError when there is no run, when it is not finished, or when a line is damaged (with its number).
    """
    info = read_run_info(folder)
    predictions = read_lines(folder, info)
    if len(predictions) < info.images:
        raise RunFolderError(
            f"{folder}: {len(predictions)} of {info.images} images are done. "
            "Finish the run first: run the same command to resume"
        )
    return Run(info, predictions, folder)


def read_lines(folder: Path, info: RunInfo, open_file: OpenFile = open_regular) -> list[Prediction]:
    """Read the images of a run that may be unfinished. Raises RunFolderError for a damaged line or too many lines."""
    path = folder / PREDICTIONS_FILE
    predictions = read_predictions(path, len(info.classes), len(info.views), info.candidates, open_file)
    if len(predictions) > info.images:
        raise RunFolderError(
            f"{path}: {len(predictions)} lines, but the run has {info.images} images. "
            "Restore the file, or run the command of this run again to truncate it"
        )
    return predictions
