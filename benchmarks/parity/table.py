"""The result as Markdown. Pure functions."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.results import described_run, markdown

NOTES = (
    "Each maker's pipeline and `prelunet validate` score the same image files. *scores*: the largest difference of a "
    "score over all images and classes; *pixels*: of a pixel of the net's input, in grey levels; *resized by*: what the "
    "maker resizes with. Pillow: pixels must be the same and scores within 1e-5; others: pixels within one grey level, "
    "scores within 1e-3. *spread*: how far apart the scores of different images are, the median over images. *errors*: "
    "wrong answers of both, with labels made so that every other one is wrong."
)


def table(result: Mapping[str, Any]) -> str:
    """Return the whole result in Markdown."""
    rows, run = result["rows"], result["run"]
    counts = ", ".join(f"{sum(row['status'] == status for row in rows)} {status}" for status in _statuses(rows))
    lines = [
        "# Adopted nets beside their makers' own pipelines",
        "",
        f"{described_run(run)} Makers: {', '.join(f'{name} {version}' for name, version in run['makers'].items())}.",
        "",
        NOTES,
        "",
        f"{len(rows)} nets: {counts}.",
        "",
        markdown(
            ("net", "status", "scores", "pixels", "resized by", "spread", "images", "classes", "errors", "worst image"),
            ((row["name"], row["status"], row.get("scores"), row.get("pixels"), row["resizer"], row["spread"],
              row["images"], row["classes"], _errors(row), row.get("worst")) for row in rows),
        ),
        "",
        "## Wrong options, which must show",
        "",
        markdown(
            ("net", "wrong", "status", "scores", "pixels"),
            ((row["name"], control["name"], control["status"], control.get("scores"), control.get("pixels"))
             for row in rows for control in row["controls"]),
        ),
        "",
        "## Nets and options",
        "",
    ]  # fmt: skip
    for row in rows:
        how = "files beside it state all" if row["sidecars"] and not row["options"] else f"`{_words(row['options'])}`"
        protocol = f"; `--protocol {row['protocol']}`" if row["protocol"] else ""
        lines.append(f"- **{row['name']}**: {row['origin']}. {how}{protocol}.{_remarks(row)}")
    return "\n".join(lines) + "\n"


def _statuses(rows: list[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["status"] for row in rows))


def _errors(row: Mapping[str, Any]) -> str | None:
    return None if "errors" not in row else f"{row['errors'][0]} and {row['errors'][1]}"


def _words(options: list[str]) -> str:
    """Return options with files by name only."""
    return shlex.join(Path(word).name if word.startswith("/") else word for word in options)


def _remarks(row: Mapping[str, Any]) -> str:
    parts = [row["note"]] if row["note"] else []
    if row["left_out"]:
        parts.append("Left out: " + "; ".join(f"{name} ({why})" for name, why in row["left_out"].items()) + ".")
    if "message" in row:
        parts.append(f"Refused: {row['message']}")
    return " " + " ".join(parts) if parts else ""
