"""Run folders as docs/formats.md describes them, written without the code that writes them in the program."""

import json
from base64 import b64encode
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

CLASSES = [  # not in the order of their names; two share a name, as cranes do in ImageNet
    {"wnid": "n01", "name": "tench"},
    {"wnid": "n02", "name": "crane"},
    {"wnid": "n03", "name": "bottle"},
    {"wnid": "n04", "name": "crane"},
    {"wnid": "n05", "name": "abacus"},
    {"wnid": "n06", "name": "fox"},
    {"wnid": "n07", "name": "never seen"},
]
VIEWS = ((256, False), (256, True), (384, False), (384, True))
MULTI_SCALE = {
    "name": "multi-scale",
    "kind": "dense",
    "scales": [256, 384],
    "mirror": True,
    "averaging": "softmax",
    "weights": "scale",
    "long_side_cap": 4,
    "crop": None,
    "interpolation": "bilinear",
    "apply_exif": False,
}


def evaluated(
    file: str,
    label: int,
    answers: Sequence[int],
    rank: int,
    *,
    first: float = 0.6,
    view_ranks: Sequence[int] = (),
    classes: int = len(CLASSES),
) -> dict[str, Any]:
    """Return a line of predictions.jsonl.

    answers: the best classes, as far as they matter; others follow up to five, with the label at its rank; first: score
    of the best class; view_ranks: one per view, default `rank`; classes: number of the model's classes.
    """
    answers, others = list(answers), (index for index in range(classes) if index not in {label, *answers})
    while len(answers) < min(5, classes):
        answers.append(label if len(answers) + 1 == rank else next(others))
    rest = max(min(first, 1 - first), 1e-6)
    scores = [first, *(rest / 2 ** (place + 1) for place in range(len(answers) - 1))]
    ranks = view_ranks or [rank] * len(VIEWS)
    return {
        "file": file,
        "label": label,
        "top": [[index, score] for index, score in zip(answers, scores, strict=True)],
        "rank": rank,
        "view_ranks": list(ranks),
        "capped": False,
    }


def refused(file: str, label: int, reason: str = "truncated") -> dict[str, Any]:
    """Return the line of an image that could not be evaluated."""
    return {"file": file, "label": label, "refused": reason}


def write_run(
    folder: Path,
    lines: Sequence[dict[str, Any]],
    *,
    classes: Sequence[dict[str, str]] = CLASSES,
    fingerprint: str = "ab" * 32,
    images: int | None = None,
    data: str | None = None,
) -> Path:
    """Write run.json, predictions.jsonl (in the order of its files) and, with `data`, a log that names its place."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {
        "version": 3,
        "model": {
            "file": "c.onnx",
            "sha256": "3f9c" + "0" * 60,
            "architecture": "C",
            "activation": "prelu",
            "checkpoint_sha256": "c" * 64,
        },
        "classes": list(classes),
        "protocol": MULTI_SCALE,
        "dataset": {
            "name": "val",
            "fingerprint": fingerprint,
            "images": len(lines) if images is None else images,
            "layout": "class folders",
            "selection": None,
        },
        "circumstances": {"provider": "CPUExecutionProvider", "precision": "fp32", "versions": {"numpy": "2.4.6"}},
        "batching": {
            "images_together": 64,
            "canvas_step": 1,
            "max_windows": 2048,
            "max_pixels": 2097152,
            "switch_pixels": 0,
        },
        "chunk": 64,
        "shard": None,
        "views": [{"scale": scale, "mirrored": mirrored, "part": "whole"} for scale, mirrored in VIEWS],
        "members": [],
    }
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "predictions.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in sorted(lines, key=itemgetter("file")))
    )
    if data is not None:
        (folder / "log.jsonl").write_text(json.dumps({"event": "start", "dataset": data}) + "\n" + '{"event": "chu')
    return folder


def write_heat_maps(
    folder: Path, maps: Sequence[tuple[dict[str, Any], tuple[int, int], list[list[list[int]]]]]
) -> None:
    """Write heatmaps.jsonl. maps: line of predictions.jsonl, height and width of the image, two lists of rows."""
    with (folder / "heatmaps.jsonl").open("w") as file:
        for line, (height, width), both in maps:
            stored = {
                "file": line["file"],
                "answer": line["top"][0][0],
                "label": line["label"],
                "height": height,
                "width": width,
                "rows": len(both[0]),
                "columns": len(both[0][0]),
                "maps": [b64encode(bytes(chain.from_iterable(rows))).decode() for rows in both],
            }
            file.write(json.dumps(stored) + "\n")


def write_ensemble(folder: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Write a run as that of an ensemble: two members, no views."""
    write_run(folder, [{**line, "view_ranks": []} for line in lines])
    run = json.loads((folder / "run.json").read_text())
    run |= {"views": [], "members": [{"model": run["model"], "weight": weight} for weight in (0.25, 0.75)]}
    (folder / "run.json").write_text(json.dumps(run))
    return folder
