"""The run folder: one validation of one model on one dataset with one protocol (docs/contract.md, "Run folder")."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluator.contract import ClassEntry, ModelContract
from evaluator.datasets.sample import Dataset
from evaluator.engine.classify import Classified, Model
from evaluator.engine.scores import shortest
from evaluator.errors import RunFolderError, UsageError
from evaluator.protocols import Protocol, protocol_from_json

RUN_VERSION = 1
CHUNK = 64  # images: the unit of writing, resuming and sharding
BEGINNINGS = STARTED, RESUMED = "start", "resume"  # events in log.jsonl that name the dataset
TOP = 5  # classes kept per image: the paper's top-5
RUN_FILE, PREDICTIONS_FILE, SCORES_FILE, LOG_FILE = "run.json", "predictions.jsonl", "scores.f32.npy", "log.jsonl"


@dataclass(frozen=True)
class ViewRank:
    """What one view alone would have said: the rank of the true class, 1 for a hit."""

    scale: int
    mirrored: bool
    rank: int


@dataclass(frozen=True)
class Prediction:
    """One image of a run, as one line of predictions.jsonl.

    label: true class index; top: up to five (class index, score), best first; rank: of the true class, from 1;
    refused: why the image could not be evaluated, and then there is no top, rank or view.
    """

    file: str
    label: int
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    views: tuple[ViewRank, ...] = ()
    capped: bool = False
    refused: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the line as plain data."""
        if self.refused is not None:
            return {"file": self.file, "label": self.label, "refused": self.refused}
        return {
            "file": self.file,
            "label": self.label,
            "top": [[index, score] for index, score in self.top],
            "rank": self.rank,
            "views": [{"scale": v.scale, "mirrored": v.mirrored, "rank": v.rank} for v in self.views],
            "capped": self.capped,
        }


def prediction_of(file: str, label: int, classified: Classified) -> Prediction:
    """Turn one classified image into its line of a run. label: true class index."""
    ranks = classified.view_ranks(label)
    return Prediction(
        file=file,
        label=label,
        top=tuple((index, shortest(score)) for index, score in classified.top(TOP)),
        rank=classified.rank(label),
        views=tuple(
            ViewRank(result.view.scale, result.view.mirrored, rank)
            for result, rank in zip(classified.views, ranks, strict=True)
        ),
        capped=classified.capped,
    )


def prediction_from_json(data: Mapping[str, Any]) -> Prediction:
    """Read one line; raises KeyError or TypeError when it is not one."""
    if "refused" in data:
        return Prediction(data["file"], data["label"], refused=data["refused"])
    return Prediction(
        file=data["file"],
        label=data["label"],
        top=tuple((int(index), float(score)) for index, score in data["top"]),
        rank=data["rank"],
        views=tuple(ViewRank(v["scale"], v["mirrored"], v["rank"]) for v in data["views"]),
        capped=data["capped"],
    )


@dataclass(frozen=True)
class RunInfo:
    """What run.json holds: everything that decides the results, and nothing else (no dates, no paths)."""

    model: Mapping[str, Any]  # file, sha256, architecture, activation
    classes: tuple[ClassEntry, ...]
    protocol: Protocol
    dataset: Mapping[str, Any]  # name, fingerprint, images
    circumstances: Mapping[str, Any]  # provider, precision, versions
    chunk: int = CHUNK

    def to_json(self) -> dict[str, Any]:
        """Return run.json as plain data."""
        return {
            "version": RUN_VERSION,
            "model": dict(self.model),
            "classes": [entry.to_json() for entry in self.classes],
            "protocol": self.protocol.to_json(),
            "dataset": dict(self.dataset),
            "circumstances": dict(self.circumstances),
            "chunk": self.chunk,
        }


def run_info(session: Model, model_file: str, dataset: Mapping[str, Any], protocol: Protocol) -> RunInfo:
    """Describe a run of this session. model_file: last path component; dataset: name, fingerprint, images."""
    contract: ModelContract = session.contract
    model = {
        "file": model_file,
        "sha256": session.model_sha256,
        "architecture": contract.name,
        "activation": contract.architecture["activation"],
    }
    return RunInfo(model, contract.classes, protocol, dataset, session.circumstances.to_json())


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Return what run.json says of a dataset."""
    return {"name": dataset.location.name, "fingerprint": dataset.fingerprint, "images": len(dataset.samples)}


@dataclass(frozen=True)
class Run:
    """A run that can be reported on. folder: where it lies; None for one that lives in a server's memory."""

    info: RunInfo
    predictions: Sequence[Prediction]
    folder: Path | None = None


def run_info_from_json(data: Mapping[str, Any]) -> RunInfo:
    """Read run.json; raises KeyError, TypeError or UsageError when it is not one."""
    return RunInfo(
        model=data["model"],
        classes=tuple(ClassEntry(entry["wnid"], entry["name"]) for entry in data["classes"]),
        protocol=protocol_from_json(data["protocol"]),
        dataset=data["dataset"],
        circumstances=data["circumstances"],
        chunk=data["chunk"],
    )


def read_run_info(folder: Path) -> RunInfo:
    """Read run.json of a folder; raises RunFolderError when there is none, or none that can be read."""
    path = folder / RUN_FILE
    try:
        data = json.loads(path.read_bytes())
        if data["version"] > RUN_VERSION:
            raise RunFolderError(
                f"{path}: version {data['version']}, but this prelunet knows versions up to {RUN_VERSION}. "
                "Install a newer prelunet"
            )
        return run_info_from_json(data)
    except OSError as error:
        raise RunFolderError(
            f"{folder}: no {RUN_FILE} here ({error.strerror}). Make a run with: "
            f"prelunet validate --model MODEL.onnx --data DIR --protocol P --run {folder}"
        ) from error
    except (ValueError, KeyError, TypeError, UsageError) as error:
        raise RunFolderError(f"{path}: damaged ({error!r}); start the run anew with --fresh") from error


def read_run(folder: Path) -> Run:
    """Read a finished run.

    Raises RunFolderError when there is none, when it is not finished, or when a line is damaged (it is named).
    """
    info = read_run_info(folder)
    predictions = read_predictions(folder / PREDICTIONS_FILE)
    if len(predictions) != info.dataset["images"]:
        raise RunFolderError(
            f"{folder}: {len(predictions)} of {info.dataset['images']} images are done. "
            "Finish the run first: the same `prelunet validate` command goes on where it stopped"
        )
    return Run(info, predictions, folder)


def find_dataset(folder: Path) -> Path | None:
    """Return where the dataset of a run lay when it was last worked on, as log.jsonl tells; None if it does not."""
    try:
        lines = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") in BEGINNINGS and isinstance(entry.get("dataset"), str):
            return Path(entry["dataset"])
    return None


def read_predictions(path: Path) -> list[Prediction]:
    """Read predictions.jsonl; raises RunFolderError that names a damaged line."""
    predictions: list[Prediction] = []
    if not path.exists():
        return predictions
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                predictions.append(prediction_from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(
                    f"{path}: line {number} is damaged ({error!r}). Restore the file, or start anew with --fresh"
                ) from error
    return predictions
