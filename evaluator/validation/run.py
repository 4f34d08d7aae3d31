"""The run folder: one validation of one model on one dataset with one protocol (docs/contract.md, "Run folder")."""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prelunet.evaluator.contract import ClassEntry, ModelContract
from prelunet.evaluator.datasets.dataset import UNLABELLED, Dataset
from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.classify import EvaluationSession
from prelunet.evaluator.engine.memory import portion_size
from prelunet.evaluator.errors import RunFolderError, UsageError
from prelunet.evaluator.json_checks import parse_json, require_int, require_keys, require_list, require_object
from prelunet.evaluator.protocols import EvaluationProtocol, View, protocol_from_json
from prelunet.evaluator.terminal import escape_unprintable
from prelunet.evaluator.validation.predictions import Prediction, read_predictions
from prelunet.evaluator.validation.run_schema import (
    check_text,
    parse_circumstances,
    parse_classes,
    parse_dataset,
    parse_member,
    parse_model,
    parse_shard,
    sanitize_name,
)

RUN_VERSION = 3
CHUNK = 64  # images: the unit of writing, resuming and sharding
GPU_CHUNK = 1024  # enough of each canvas to make up for the changes between them
RUN_FILE, PREDICTIONS_FILE, SCORES_FILE = "run.json", "predictions.jsonl", "scores.f32.npy"


@dataclass(frozen=True)
class Batching:
    """Which images were computed together: in other company the last bits of a score may differ.

    images_together: of a chunk, in a portion that is prepared and computed at a time; rules: by which the batches of
    each portion were planned.
    """

    images_together: int
    rules: BatchRules

    def to_json(self) -> dict[str, int]:
        """Return it as plain data."""
        return {"images_together": self.images_together, **self.rules.to_json()}


def batching_from_json(data: Any) -> Batching | None:
    """Read what `Batching.to_json` wrote, or null of a run that computed nothing; raises ValueError."""
    if data is None:
        return None
    rules = dict(require_object(data, "batching"))
    images_together = require_int(rules.pop("images_together", None), "images_together", 1)
    return Batching(images_together, BatchRules.from_json(rules))


@dataclass(frozen=True)
class RunInfo:
    """What run.json holds: everything that decides the results, and nothing else (no dates, no paths)."""

    model: Mapping[str, Any]  # file, sha256, architecture, activation
    classes: tuple[ClassEntry, ...]
    protocol: EvaluationProtocol
    dataset: Mapping[str, Any]  # name, fingerprint, images, layout, selection
    circumstances: Mapping[str, Any]  # provider, precision, versions
    batching: Batching | None = None  # None where stored scores of several runs were averaged
    chunk: int = CHUNK
    shard: tuple[int, int] | None = None  # which (from 1) of how many; None for the whole dataset
    members: tuple[Mapping[str, Any], ...] = ()  # model and weight of each, where scores of several runs were averaged

    @property
    def views(self) -> tuple[View, ...]:
        """Return the views whose ranks stand in each line; none for an ensemble, which has only their average."""
        return () if self.members else self.protocol.views

    @property
    def span(self) -> tuple[int, int]:
        """Return first and last + 1 of the dataset's images that belong to this run: all, or a shard's whole chunks."""
        images: int = self.dataset["images"]
        if self.shard is None:
            return 0, images
        number, of = self.shard
        chunks = -(-images // self.chunk)
        return min((number - 1) * chunks // of * self.chunk, images), min(number * chunks // of * self.chunk, images)

    @property
    def images(self) -> int:
        """Return how many images belong to this run."""
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
    session: EvaluationSession,
    model_file: str,
    dataset: Mapping[str, Any],
    protocol: EvaluationProtocol,
    shard: tuple[int, int] | None = None,
    *,
    memory: int | None = None,
) -> RunInfo:
    """Describe a run of this session.

    model_file: last path component; dataset: as `describe_dataset` tells it; memory: most bytes of
    the process (`portion_size`), None for what is usual.
    """
    contract: ModelContract = session.contract
    model = {
        "file": sanitize_name(model_file),
        "sha256": session.model_sha256,
        "architecture": contract.name,
        "activation": sanitize_name(contract.architecture["activation"]),
    }
    gpu = session.circumstances.on_gpu
    chunk = GPU_CHUNK if gpu else CHUNK
    batching = Batching(portion_size(protocol, chunk, memory, gpu=gpu), session.rules)
    circumstances = session.circumstances.to_json()
    return RunInfo(model, contract.classes, protocol, dataset, circumstances, batching, chunk, shard)


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Return what run.json says of a dataset."""
    return {
        "name": sanitize_name(dataset.location.name),
        "fingerprint": dataset.fingerprint,
        "images": len(dataset.samples),
        "layout": dataset.layout,
        "selection": dataset.selection,
    }


@dataclass(frozen=True)
class Run:
    """A run that can be reported on. folder: where it lies; None for one that lives in a server's memory."""

    info: RunInfo
    predictions: Sequence[Prediction]
    folder: Path | None = None

    @property
    def labelled(self) -> bool:
        """Say whether the true classes are known, so that there are errors to count."""
        return any(prediction.label != UNLABELLED for prediction in self.predictions)

    @property
    def where(self) -> str:
        """Return what a message calls the run: its folder, or the model of one that lies nowhere."""
        return str(self.folder or self.info.model["file"])


def require_unsharded(info: RunInfo, where: str | Path) -> None:
    """Refuse a shard: what is said of a run is said of all its dataset. Raises RunFolderError. where: for the text."""
    if info.shard is not None:
        raise RunFolderError(
            f"{where}: shard {info.shard[0]} of {info.shard[1]}, not a whole run. Join its shards first: "
            "prelunet merge SHARD... --run DIR"
        )


def require_labels(run: Run) -> None:
    """Refuse a run with images whose true class is not known: there are no errors to count. Raises UsageError."""
    if unknown := sum(prediction.label == UNLABELLED for prediction in run.predictions):
        raise UsageError(
            f"{run.where}: the true class of {unknown:,} of {len(run.predictions):,} images is not known, so there are "
            f"no errors to count. Validate on labelled images; answers without labels are written by: "
            f"prelunet submission {run.where}"
        )


def require_same_images(one: Run, other: Run) -> None:
    """Refuse runs whose lines are not of the same images with the same labels, line by line. Raises RunFolderError.

    For runs whose fingerprints agree: one of them was changed.
    """
    for number, (a, b) in enumerate(zip(one.predictions, other.predictions, strict=True), start=1):
        if (a.file, a.label) != (b.file, b.label):
            here, there = (f"{escape_unprintable(line.file[:100])} (label {line.label})" for line in (a, b))
            raise RunFolderError(
                f"line {number} of the predictions of {one.where} is of {here}, but of {there} in {other.where}, "
                "although their fingerprints agree: one of them is damaged. Restore its predictions.jsonl, or do it "
                "anew with its command and --fresh"
            )


_RUN_KEYS = {
    "version", "model", "classes", "protocol", "dataset", "circumstances", "batching", "chunk", "shard",
    "views", "members",
}  # fmt: skip


def run_info_from_json(data: Any) -> RunInfo:
    """Read run.json; raises ValueError or UsageError that says what is wrong with it."""
    run = require_keys(data, "it", _RUN_KEYS)
    info = RunInfo(
        model=parse_model(run["model"]),
        classes=parse_classes(run["classes"]),
        protocol=protocol_from_json(run["protocol"]),
        dataset=parse_dataset(run["dataset"]),
        circumstances=parse_circumstances(run["circumstances"]),
        batching=batching_from_json(run["batching"]),
        chunk=require_int(run["chunk"], "chunk", 1),
        shard=parse_shard(run["shard"]),
        members=tuple(parse_member(member) for member in require_list(run["members"], "members")),
    )
    check_text(info.protocol.name, "name of the protocol")
    if require_list(run["views"], "views") != [view.to_json() for view in info.views]:
        raise ValueError("views should be those of the protocol, in its order, or none for an ensemble")
    return info


_KEYS_OF_ANY_VERSION = {"version", "model", "protocol"}


def is_run_folder(folder: Path) -> bool:
    """Say whether a folder holds a run of any version, perhaps a damaged one: whether its run.json looks like ours."""
    try:
        data = parse_json(_bytes_of(folder / RUN_FILE))
    except (OSError, ValueError):
        return False
    return type(data) is dict and data.keys() >= _KEYS_OF_ANY_VERSION


def read_run_info(folder: Path) -> RunInfo:
    """Read run.json of a folder; raises RunFolderError when there is none, or none that can be read."""
    path = folder / RUN_FILE
    try:
        data = parse_json(_bytes_of(path))
        version = require_int(require_object(data, "it").get("version"), "version", 1)
        if version == RUN_VERSION:
            return run_info_from_json(data)
    except OSError as error:
        raise RunFolderError(
            f"{folder}: no {RUN_FILE} here ({error.strerror}). Make a run with: "
            f"prelunet validate --model MODEL.onnx --data DIR --protocol P --run {folder}"
        ) from error
    except (ValueError, UsageError) as error:
        anew = "start anew with --fresh" if is_run_folder(folder) else "do the run anew in another folder"
        raise RunFolderError(f"{path}: damaged ({error}). Restore the file, or {anew}") from error
    fix = "Install a newer prelunet" if version > RUN_VERSION else "Do the run anew with --fresh"
    raise RunFolderError(f"{path}: version {version}, but this prelunet reads version {RUN_VERSION}. {fix}")


def _bytes_of(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))  # a pipe would keep us waiting
    return path.read_bytes()


def read_run(folder: Path) -> Run:
    """Read a finished run.

    Raises RunFolderError when there is none, when it is not finished, or when a line is damaged (it is named).
    """
    info = read_run_info(folder)
    predictions = read_predictions(folder / PREDICTIONS_FILE, len(info.classes), len(info.views))
    images = info.images
    if len(predictions) < images:
        raise RunFolderError(
            f"{folder}: {len(predictions)} of {images} images are done. "
            "Finish the run first: the same command goes on where it stopped"
        )
    if len(predictions) > images:
        raise RunFolderError(
            f"{folder / PREDICTIONS_FILE}: {len(predictions)} lines, but the run has {images} images. "
            "Restore the file, or cut it back with the command that made it"
        )
    return Run(info, predictions, folder)
