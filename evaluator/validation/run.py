"""The run folder: one validation of one model on one dataset with one protocol (docs/contract.md, "Run folder")."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluator.contract import ClassEntry, ModelContract
from evaluator.datasets.sample import UNLABELLED, Dataset, DatasetPlace
from evaluator.engine.classify import Classified, Model
from evaluator.engine.scores import shortest
from evaluator.errors import RunFolderError, UsageError
from evaluator.protocols import Protocol, View, protocol_from_json
from evaluator.strict import a_list, an_object, flag, parse_json, record, text, whole

RUN_VERSION = 2
CHUNK = 64  # images: the unit of writing, resuming and sharding
BEGINNINGS = STARTED, RESUMED = "start", "resume"  # events in log.jsonl that name the dataset
TOP = 5  # classes kept per image: the paper's top-5
RUN_FILE, PREDICTIONS_FILE, SCORES_FILE, LOG_FILE = "run.json", "predictions.jsonl", "scores.f32.npy", "log.jsonl"


@dataclass(frozen=True)
class Prediction:
    """One image of a run, as one line of predictions.jsonl.

    label: true class index, UNLABELLED (-1, in the file null) where nobody knows it; top: up to five (class index,
    score), best first; rank: of the true class, from 1, or 0 where it is not known; view_ranks: its rank in each view
    alone, in the order of `RunInfo.views`; refused: why the image could not be evaluated, and then there is no top and
    no rank.
    """

    file: str
    label: int
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    view_ranks: tuple[int, ...] = ()
    capped: bool = False
    refused: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the line as plain data."""
        label = None if self.label == UNLABELLED else self.label
        if self.refused is not None:
            return {"file": self.file, "label": label, "refused": self.refused}
        return {
            "file": self.file,
            "label": label,
            "top": [[index, score] for index, score in self.top],
            "rank": self.rank or None,
            "view_ranks": list(self.view_ranks),
            "capped": self.capped,
        }


def prediction_of(file: str, label: int, classified: Classified) -> Prediction:
    """Turn one classified image into its line of a run. label: true class index, or UNLABELLED."""
    known = label != UNLABELLED
    return Prediction(
        file=file,
        label=label,
        top=tuple((index, shortest(score)) for index, score in classified.top(TOP)),
        rank=classified.rank(label) if known else 0,
        view_ranks=tuple(classified.view_ranks(label)) if known else (),
        capped=classified.capped,
    )


_REFUSED_KEYS = {"file", "label", "refused"}
_EVALUATED_KEYS = {"file", "label", "top", "rank", "view_ranks", "capped"}
_NOWHERE = {"", ".", ".."}  # parts of a path that lead out of a folder, or to itself
_LARGEST_SCORE = 1.001  # a probability, and what half precision may add to it


def prediction_from_json(data: Any, classes: int, views: int) -> Prediction:
    """Read one line of a run of a model with so many classes and of so many views.

    Strict, because a run folder may come from anybody and nobody asks again: ValueError says what is wrong.
    """
    if type(data) is dict and "refused" in data:
        entry = record(data, "it", _REFUSED_KEYS)
        return Prediction(
            file=_relative(entry["file"]),
            label=_label(entry["label"], classes),
            refused=text(entry["refused"], "refused"),
        )
    entry = record(data, "it", _EVALUATED_KEYS)
    label = _label(entry["label"], classes)
    if label == UNLABELLED and (entry["rank"] is not None or entry["view_ranks"] != []):
        raise ValueError("without a label there is no rank")
    return Prediction(
        file=_relative(entry["file"]),
        label=label,
        top=_top(entry["top"], classes),
        rank=0 if label == UNLABELLED else whole(entry["rank"], "rank", 1, classes),
        view_ranks=() if label == UNLABELLED else _view_ranks(entry["view_ranks"], classes, views),
        capped=flag(entry["capped"], "capped"),
    )


def _label(data: Any, classes: int) -> int:
    return UNLABELLED if data is None else whole(data, "label", 0, classes - 1)


def _relative(file: Any) -> str:
    """Return the name of a file inside its dataset; whoever joins it to a folder stays in that folder."""
    if not _NOWHERE.isdisjoint(text(file, "file").split("/")) or "\0" in file:
        raise ValueError(f"file should be a relative name inside the dataset, not {file[:100]!r}")
    return str(file)


def _top(data: Any, classes: int) -> tuple[tuple[int, float], ...]:
    answers = []
    for answer in a_list(data, "top"):
        if type(answer) is not list or len(answer) != 2:
            raise ValueError("each answer in top should be [class index, score]")
        index, score = answer
        if type(score) not in {float, int} or not 0 <= score <= _LARGEST_SCORE:
            raise ValueError("a score should be a number from 0 to 1")
        answers.append((whole(index, "a class index in top", 0, classes - 1), float(score)))
    if not 1 <= len(answers) <= TOP:
        raise ValueError(f"top should have 1 to {TOP} answers, not {len(answers)}")
    return tuple(answers)


def _view_ranks(data: Any, classes: int, views: int) -> tuple[int, ...]:
    ranks = a_list(data, "view_ranks")
    if len(ranks) != views:
        raise ValueError(f"view_ranks should be those of the run's {views} views, not {len(ranks)}")
    return tuple(whole(rank, "rank of a view", 1, classes) for rank in ranks)


@dataclass(frozen=True)
class RunInfo:
    """What run.json holds: everything that decides the results, and nothing else (no dates, no paths)."""

    model: Mapping[str, Any]  # file, sha256, architecture, activation
    classes: tuple[ClassEntry, ...]
    protocol: Protocol
    dataset: Mapping[str, Any]  # name, fingerprint, images, layout, selection
    circumstances: Mapping[str, Any]  # provider, precision, versions
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
            "chunk": self.chunk,
            "shard": self.shard and {"number": self.shard[0], "of": self.shard[1]},
            "views": [view.to_json() for view in self.views],
            "members": [dict(member) for member in self.members],
        }


def run_info(
    session: Model,
    model_file: str,
    dataset: Mapping[str, Any],
    protocol: Protocol,
    shard: tuple[int, int] | None = None,
) -> RunInfo:
    """Describe a run of this session. model_file: last path component; dataset: as `describe_dataset` tells it."""
    contract: ModelContract = session.contract
    model = {
        "file": model_file,
        "sha256": session.model_sha256,
        "architecture": contract.name,
        "activation": contract.architecture["activation"],
    }
    return RunInfo(model, contract.classes, protocol, dataset, session.circumstances.to_json(), shard=shard)


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Return what run.json says of a dataset."""
    return {
        "name": dataset.location.name,
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


_RUN_KEYS = {
    "version", "model", "classes", "protocol", "dataset", "circumstances", "chunk", "shard", "views", "members",
}  # fmt: skip


def run_info_from_json(data: Any) -> RunInfo:
    """Read run.json; raises ValueError or UsageError that says what is wrong with it."""
    run = record(data, "it", _RUN_KEYS)
    classes = [record(entry, "a class", {"wnid", "name"}) for entry in a_list(run["classes"], "classes")]
    if not classes:
        raise ValueError("classes should not be empty")
    info = RunInfo(
        model=_model(run["model"]),
        classes=tuple(ClassEntry(text(entry["wnid"], "wnid"), text(entry["name"], "name")) for entry in classes),
        protocol=protocol_from_json(run["protocol"]),
        dataset=_dataset(run["dataset"]),
        circumstances=_circumstances(run["circumstances"]),
        chunk=whole(run["chunk"], "chunk", 1),
        shard=_shard(run["shard"]),
        members=tuple(_member(member) for member in a_list(run["members"], "members")),
    )
    if a_list(run["views"], "views") != [view.to_json() for view in info.views]:
        raise ValueError("views should be those of the protocol, in its order, or none for an ensemble")
    return info


def _model(data: Any) -> dict[str, Any]:
    model = record(data, "model", {"file", "sha256", "architecture", "activation"})
    for key, value in model.items():
        text(value, key)
    _check_digest(model["sha256"], "sha256")
    return model


def _dataset(data: Any) -> dict[str, Any]:
    dataset = record(data, "dataset", {"name", "fingerprint", "images", "layout", "selection"})
    text(dataset["name"], "name of the dataset")
    text(dataset["layout"], "layout")
    whole(dataset["images"], "images", 1)
    _check_digest(dataset["fingerprint"], "fingerprint")
    if dataset["selection"] is not None:
        text(dataset["selection"], "selection")
    return dataset


def _circumstances(data: Any) -> dict[str, Any]:
    circumstances = record(data, "circumstances", {"provider", "precision", "versions"})
    versions = an_object(circumstances["versions"], "versions")
    for key, value in (*versions.items(), *((key, circumstances[key]) for key in ("provider", "precision"))):
        text(value, key)
    return circumstances


def _shard(data: Any) -> tuple[int, int] | None:
    if data is None:
        return None
    shard = record(data, "shard", {"number", "of"})
    of = whole(shard["of"], "of", 1)
    return whole(shard["number"], "number of the shard", 1, of), of


def _member(data: Any) -> dict[str, Any]:
    member = record(data, "a member", {"model", "weight"})
    _model(member["model"])
    if type(member["weight"]) not in {int, float} or not 0 < member["weight"] <= 1:
        raise ValueError("the weight of a member should be above 0 and at most 1")
    return member


def _check_digest(digest: Any, key: str) -> None:
    if not re.fullmatch("[0-9a-f]{64}", text(digest, key)):
        raise ValueError(f"{key} should be 64 hexadecimal digits")


def read_run_info(folder: Path) -> RunInfo:
    """Read run.json of a folder; raises RunFolderError when there is none, or none that can be read."""
    path = folder / RUN_FILE
    try:
        data = parse_json(path.read_bytes())
        version = whole(an_object(data, "it").get("version"), "version", 1)
        if version == RUN_VERSION:
            return run_info_from_json(data)
    except OSError as error:
        raise RunFolderError(
            f"{folder}: no {RUN_FILE} here ({error.strerror}). Make a run with: "
            f"prelunet validate --model MODEL.onnx --data DIR --protocol P --run {folder}"
        ) from error
    except (ValueError, UsageError) as error:
        raise RunFolderError(f"{path}: damaged ({error}). Restore the file, or start anew with --fresh") from error
    mend = "Install a newer prelunet" if version > RUN_VERSION else "Do the run anew with --fresh"
    raise RunFolderError(f"{path}: version {version}, but this prelunet reads version {RUN_VERSION}. {mend}")


def read_run(folder: Path) -> Run:
    """Read a finished run.

    Raises RunFolderError when there is none, when it is not finished, or when a line is damaged (it is named).
    """
    info = read_run_info(folder)
    predictions = read_predictions(folder / PREDICTIONS_FILE, info)
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


def find_dataset(folder: Path) -> DatasetPlace | None:
    """Return where the dataset of a run lay when it was last worked on, as log.jsonl tells; None if it does not."""
    entry = last_beginning(folder)
    try:
        return None if entry is None else place_from_log(entry)
    except ValueError:
        return None


def place_to_log(place: DatasetPlace) -> dict[str, Any]:
    """Return what log.jsonl says of where a dataset lies, so that it can be opened again from anywhere."""
    return {
        "dataset": str(place.path.resolve()),
        "labels": place.labels and str(place.labels.resolve()),
        "no_labels": place.no_labels,
        "limit": place.limit,
        "classes": list(place.classes),
    }


def place_from_log(entry: Mapping[str, Any]) -> DatasetPlace:
    """Read what `place_to_log` wrote; ValueError when it is not that. What is not told is as `DatasetPlace` has it."""
    labels, limit = entry.get("labels"), entry.get("limit")
    return DatasetPlace(
        path=_path(entry.get("dataset"), "dataset"),
        labels=None if labels is None else _path(labels, "labels"),
        no_labels=flag(entry.get("no_labels", False), "no_labels"),
        limit=None if limit is None else whole(limit, "limit", 1),
        classes=tuple(text(wnid, "a class") for wnid in a_list(entry.get("classes", []), "classes")),
    )


def _path(value: Any, what: str) -> Path:
    if "\0" in text(value, what):
        raise ValueError(f"{what} should be a path")
    return Path(value)


def last_beginning(folder: Path) -> dict[str, Any] | None:
    """Return the last line of log.jsonl that tells of a start and where the dataset lay; None if there is none."""
    try:
        lines = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            entry = an_object(parse_json(line), "it")
            if entry.get("event") in BEGINNINGS and "\0" not in text(entry.get("dataset"), "dataset"):
                return entry
        except ValueError:
            continue
    return None


def read_predictions(path: Path, info: RunInfo) -> list[Prediction]:
    """Read predictions.jsonl of a run, in the order of the file names; RunFolderError names a damaged line."""
    predictions: list[Prediction] = []
    if not path.exists():
        return predictions
    classes, views, last = len(info.classes), len(info.views), ""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                prediction = prediction_from_json(parse_json(line), classes, views)
                if prediction.file <= last:
                    raise ValueError(f"{prediction.file[:100]!r} should not follow {last[:100]!r}: names rise")
            except ValueError as error:
                raise RunFolderError(
                    f"{path}: line {number} is damaged ({error}). Restore the file, or do the images from there on "
                    "again: with the command that made the run"
                ) from error
            predictions.append(prediction)
            last = prediction.file
    return predictions
