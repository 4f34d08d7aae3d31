"""The result as Markdown. Pure functions."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.results import cell, described_run, markdown

NOTES = (
    "Each maker's pipeline and `prelunet validate` score the same image files. *scores*: largest difference of a score "
    "over all images and classes; *pixels*: of a pixel of the net's input, in grey levels; *resized by*: what the "
    "maker resizes with. Pillow and tensors: pixels must be the same and scores within 1e-5; others: pixels within one "
    "grey level, scores within 1e-3. *spread*: how far apart the scores of different images are, the median over "
    "images. *other*: how far another pipeline is from the maker's, scores and pixels; for transformers' tensors, its "
    "own with Pillow."
)
KINDS = {
    "equal": "as its maker's",
    "refused": "refused, with the reason",
    "not stated": "no option states its pipeline, so that it was not adopted",
    "DIFFERENT": "farther from its maker's than the rule allows",
    "ALIKE": "scores too much alike to show anything",
    "REFUSED": "refused, but should not be",
}


def table(result: Mapping[str, Any]) -> str:
    """Return the whole result in Markdown."""
    rows, run = result["rows"], result["run"]
    counts = {status: sum(row["status"] == status for row in rows) for status in KINDS}
    kinds = "; ".join(f"{count} {status} ({KINDS[status]})" for status, count in counts.items() if count)
    lines = [
        "# Adopted nets beside their makers' own pipelines",
        "",
        f"{described_run(run)} Makers: {', '.join(f'{name} {version}' for name, version in run['makers'].items())}.",
        "",
        NOTES,
        "",
        f"{len(rows)} rows: {kinds}.",
        "",
        markdown(
            ("net", "options", "status", "scores", "pixels", "resized by", "spread", "images", "other"),
            ((row["name"], _options(row), row["status"], row.get("scores"), row.get("pixels"), row["resizer"],
              row["spread"], row["images"], _pair(row["other"])) for row in rows),
        ),
        *_two_commands(result["loop"]),
        "",
        "## One wrong option, which must show",
        "",
        markdown(
            ("net", "scores as stated", "wrong option", "scores", "pixels", "shows"),
            ((row["name"], row.get("scores"), f"`{wrong['option']}`", wrong.get("scores"), wrong.get("pixels"),
              shows(row, wrong))
             for row in rows for wrong in row["wrong"]),
        ),
        "",
        "## The nets",
        "",
        *(f"- **{row['name']}**: {row['origin']}.{_remarks(row)}" for row in rows),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def shows(row: Mapping[str, Any], wrong: Mapping[str, Any]) -> bool:
    """Return whether a wrong option moves the scores away from the maker's, beyond the rule and the right options."""
    return wrong["status"] == "DIFFERENT" and "scores" in row and bool(wrong["scores"] > 10 * row["scores"])


def _options(row: Mapping[str, Any]) -> str:
    if row["options"] is None:
        return "–"
    words = shlex.join(row["options"])
    return f"`{words}`" if words else "none"


def _pair(values: Sequence[float] | None) -> str:
    return "–" if values is None else ", ".join(map(cell, values))


def _two_commands(loop: Mapping[str, Any] | None) -> list[str]:
    if loop is None:
        return []
    lines = [
        f"- transformers' own pipeline, {how}: {' and '.join(loop[resizer]['errors'])} %; images that only one of the "
        f"two gets right: {loop[resizer]['images_right_for_one_only']}"
        for resizer, how in (("Pillow", "resizing with Pillow"), ("tensors", "resizing tensors, its default"))
    ]
    return [
        "",
        "## Two commands for a ViT's folder",
        "",
        f"`{'` and `'.join(loop['commands'])}`, on {loop['images']} images in class folders: top-1 and top-5 error "
        f"{' and '.join(loop['errors'])} %.",
        "",
        *lines,
    ]


def _remarks(row: Mapping[str, Any]) -> str:
    parts = [row["note"]] if row["note"] else []
    if row["left_out"]:
        parts.append("Left out: " + "; ".join(f"{name} ({why})" for name, why in row["left_out"].items()) + ".")
    if "message" in row:
        parts.append(f"Refused: {row['message']}")
    return " " + " ".join(parts) if parts else ""
