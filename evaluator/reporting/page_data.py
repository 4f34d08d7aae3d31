"""Data of all classes and images for the page's scripts: arrays without keys, so that 50,000 images take 2 MB.

report_data.js reads it and repeats the order of the numbers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from ..validation.heatmaps import map_colors, read_heat_maps
from ..validation.predictions import Prediction
from ..validation.run import Run
from .gallery import Gallery
from .report import Report
from .statistics import TOPS

# Images whose answers the page holds, about 45 bytes each. Beyond that, each class contributes its first ones.
MAX_LISTED_IMAGES = 60_000
MAX_HEAT_MAPS = 300  # images with heat maps on the page, 2.2 kB each: beside the pictures, it stays below 8 MB
PER_MILLE = 1000  # scores are stored with three decimals, as integers


def page_data(report: Report, run: Run, gallery: Gallery) -> dict[str, Any]:
    """Return the data of the page's scripts; deterministic for a run and gallery."""
    of_class: list[list[Prediction]] = [[] for _ in run.info.classes]
    for prediction in run.predictions:
        of_class[prediction.label].append(prediction)
    share = fair_share([len(images) for images in of_class], MAX_LISTED_IMAGES)
    listed = [sorted(images, key=_most_informative_first)[:share] for images in of_class]
    place = {p.file: f"{label}-{number}" for label, images in enumerate(listed) for number, p in enumerate(images)}
    return {
        "errors": [report["top1_error"], report["top5_error"]],
        "classes": [_class(entry) for entry in report["classes"]],
        "taken": _confusions_by_class(run.predictions, len(of_class)),
        "shared": report["same_names"],
        "views": [[describe_view(view), view["top1_error"], view["top5_error"]] for view in report["views"]],
        "images": [_images(images) for images in listed],
        "tiles": {place[file]: tile for file, tile in gallery.tiles.items() if file in place},
        "inferno": map_colors(),
        "heatmaps": {
            place[maps.file]: [maps.height, maps.width, maps.columns, *to_builtins(maps.maps)]
            for maps in read_heat_maps(run, MAX_HEAT_MAPS)
            if maps.file in place
        },
        "large": {place[m.prediction.file]: n for n, m in enumerate(gallery.mistakes) if m.prediction.file in place},
    }


def fair_share(counts: Iterable[int], total: int) -> int:
    """Return the largest limit per class such that the sum of min(count, limit) is at most `total`; at least 1.

    counts: integers from 0. If everything fits, the limit is the largest count.
    """
    counts = sorted(counts)
    for place, count in enumerate(counts):
        others = len(counts) - place
        if count * others > total:
            return max(1, total // others)
        total -= count
    return max([1, *counts])


def describe_view(view: Mapping[str, Any]) -> str:
    """Return a short description of a report's view: `256 mirrored`, `256 top-left`."""
    part = {"whole": "", "nine": ""}.get(view["part"], f" {view['part']}")
    return f"{view['scale']}{part}{' mirrored' if view['mirrored'] else ''}"


def _most_informative_first(prediction: Prediction) -> tuple[int, float, str]:
    """Return the sort key for: mistakes, most confident first; right answers, least confident first; refused images."""
    if prediction.refused is not None:
        return 2, 0.0, prediction.file
    score = prediction.top[0][1]
    return (0, -score, prediction.file) if prediction.rank > 1 else (1, score, prediction.file)


def _class(entry: Mapping[str, Any]) -> list[Any]:
    """Return a class's numbers in the order of report_data.js; the confidence with one decimal."""
    errors = [number for k in TOPS for number in (entry[f"top{k}_wrong"], *(entry[f"top{k}_interval"] or (None, None)))]
    views = [view[f"top{k}_error"] for k in TOPS for view in entry["views"]]
    numbers = (entry["images"], entry["evaluated"], *errors, _rounded(entry["confidence"]), entry["median_rank"])
    return [entry["wnid"], entry["name"], *numbers, views]


def _rounded(percent: float | None) -> float | None:
    return None if percent is None else round(percent, 1)


def _confusions_by_class(predictions: Iterable[Prediction], classes: int) -> list[list[int]]:
    """Return, per class, its wrong answers: class index, count, class index, count, ...; most frequent first."""
    wrong: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for prediction in predictions:
        if prediction.rank > 1:
            wrong[prediction.label][prediction.top[0][0]] += 1
    ranked = (sorted(wrong[label].items(), key=lambda pair: (-pair[1], pair[0])) for label in range(classes))
    return [[number for pair in pairs for number in pair] for pairs in ranked]


def _images(images: Sequence[Prediction]) -> list[Any]:
    """Return the images of a class: common prefix and suffix of their names, the parts between, ranks and so on.

    width: answers listed per image; answers, scores: concatenated over the images, `width` entries each; reasons: of
    the refused images, which come last and have no rank; capped: indices of capped images among the evaluated ones;
    also: index → further true classes, left out where no image has any.
    """
    beginning, end, middles = split_affixes([image.file for image in images])
    seen = [image for image in images if image.refused is None]
    also = {number: image.also for number, image in enumerate(seen) if image.also}
    return [
        beginning,
        end,
        middles,
        [image.rank for image in seen],
        len(seen[0].top) if seen else 0,
        [index for image in seen for index, _ in image.top],
        [min(PER_MILLE, round(score * PER_MILLE)) for image in seen for _, score in image.top],
        [image.refused for image in images if image.refused is not None],
        [number for number, image in enumerate(seen) if image.capped],
        *([also] if also else []),
    ]


def split_affixes(names: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return the common prefix and suffix of all names, and the part of each in between."""
    beginning = _common_prefix(names)
    rests = [name[len(beginning) :] for name in names]
    end = _common_prefix([rest[::-1] for rest in rests])[::-1]
    return beginning, end, [rest[: len(rest) - len(end)] for rest in rests]


def _common_prefix(names: Sequence[str]) -> str:
    first, last = min(names, default=""), max(names, default="")  # the prefix of these two is common to all
    different = (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(different, min(len(first), len(last)))]
