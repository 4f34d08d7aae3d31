"""All runs below a folder in one table: models x datasets x protocols, with errors, speed, and what computed them."""

import csv
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC
from pathlib import Path
from typing import Any, TypeAlias

from ..datasets.dataset import UNLABELLED
from ..errors import RunFolderError
from ..files import OpenFile, open_regular, walk_without_links
from ..protocols import title_of
from ..validation.run import PREDICTIONS_FILE, RUN_FILE, RunInfo, read_lines, read_run_info
from ..validation.run_log import LOG_FILE, speed_and_date
from .html import render_html
from .report import describe_protocol, error_with_interval, scored_over, short_provider
from .report_page import REPORT_FOLDER
from .statistics import TOPS
from .tables import evaluated_images, run_errors

Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = dict[tuple[Any, ...], Row]  # by folder, and by what changes whenever one of its files does

COLUMNS = (
    *("run", "status", "problem"),
    *("model", "architecture", "sha256"),
    *("dataset", "fingerprint", "selection", "restriction", "images", "evaluated", "refused"),
    *("protocol", "views"),
    *(f"top{k}_{what}" for k in TOPS for what in ("error", "low", "high")),
    *("images_per_second", "provider", "precision", "versions", "date", "report"),
)
_USUAL = {"prelunet", "numpy", "pillow", "python"}  # versions that the table does not show
_PORTIONS = "portions"  # of `compare --until-decided`, which merges those of each model into one run
_READ = (RUN_FILE, PREDICTIONS_FILE, LOG_FILE)


def read_runs(
    folder: Path,
    known: Rows | None = None,
    *,
    open_file: OpenFile | None = open_regular,
    depth: int | None = None,
    limit: int | None = None,
) -> Rows:
    """Return a row of COLUMNS for each run below a folder, by dataset, protocol and top-1 error, lowest first.

    status: finished, unfinished, shard, unlabeled or damaged, of which only the first has errors; problem: what to know
    about the others; errors and intervals are in percent; views, restriction, versions: in words; report: path of
    report.html below the folder, if there is one.
    known: an earlier result, whose rows are taken where no file has changed; open_file: None to follow no links, as in
    a server; depth, limit: of `walk_without_links`.
    """
    known, rows, reports = known or {}, Rows(), dict[Path, str]()
    for below, files, open_here in walk_without_links(folder.resolve(), depth=depth, limit=limit):
        if RUN_FILE in files and below.parent.name != _PORTIONS:
            key = (below, *(_stamp(folder / below / name, open_file or open_here) for name in _READ))
            rows[key] = known.get(key) or _read_row(folder, below, open_file or open_here)
        if below.name == REPORT_FOLDER and "report.html" in files:
            reports[below.parent] = str(below / "report.html")
    found = {key: row | {"report": reports.get(key[0])} for key, row in rows.items()}
    return dict(sorted(found.items(), key=lambda item: _place(item[1])))


def _stamp(path: Path, open_file: OpenFile) -> tuple[int, ...]:
    with suppress(OSError), open_file(path) as file:
        found = os.fstat(file.fileno())
        return found.st_ino, found.st_size, found.st_mtime_ns
    return ()


def _read_row(top: Path, below: Path, open_file: OpenFile) -> Row:
    row: Row = {**dict.fromkeys(COLUMNS), "run": str(below)}
    folder = top / below
    try:
        info = read_run_info(folder, open_file)
        row |= described(info)
        with suppress(OSError), open_file(folder / LOG_FILE) as log:
            row["images_per_second"], date = speed_and_date(log)
            row["date"] = date and date.astimezone(UTC).isoformat(timespec="seconds")
        return row | _result(info, folder, open_file)
    except (RunFolderError, OSError) as error:
        problem = str(error).replace(f"{top}{os.sep}", "")  # a server does not tell where its folder is
        return row | {"status": "damaged", "problem": problem}


def described(info: RunInfo) -> Row:
    """Return the columns on what was evaluated, and how."""
    model, dataset, circumstances = info.model, info.dataset, info.circumstances
    some = info.candidates is not None and len(info.candidates) < len(info.classes)
    restriction = scored_over({"dataset": dataset}) if some else None
    if some and not dataset["restriction"]["name"].startswith("imagenet-"):  # another list may be as long
        restriction = f"{restriction}, sha256 {hashlib.sha256(repr(info.candidates).encode()).hexdigest()[:8]}"
    return {
        **{"model": model["file"], "architecture": model["architecture"], "sha256": model["sha256"]},
        **{"dataset": dataset["name"], "fingerprint": dataset["fingerprint"], "selection": dataset["selection"]},
        "restriction": restriction,
        "images": info.images,
        **{"protocol": title_of(info.protocol), "views": describe_protocol(info.protocol.to_json())},
        **{"provider": short_provider(circumstances), "precision": circumstances["precision"]},
        "versions": ", ".join(f"{name} {version}" for name, version in circumstances["versions"].items()),
    }


def _result(info: RunInfo, folder: Path, open_file: OpenFile) -> Row:
    """Return the status with the errors, or with the reason why there are none."""
    predictions = read_lines(folder, info, open_file)
    if len(predictions) < info.images:
        return {"status": "unfinished", "problem": f"{len(predictions):,} of {info.images:,} images are done"}
    if info.shard is not None:
        return {"status": "shard", "problem": f"part {info.shard[0]} of {info.shard[1]}, for prelunet merge"}
    if any(line.label == UNLABELLED for line in predictions):
        return {"status": "unlabeled", "problem": "without labels there are no errors"}
    seen = evaluated_images(predictions, len(info.views))
    counts = {"evaluated": len(seen.rank), "refused": len(predictions) - len(seen.rank)}
    errors = run_errors(seen)
    ends = {
        f"top{k}_{end}": bound
        for k in TOPS
        for end, bound in zip(("low", "high"), errors[f"top{k}_interval"] or (None, None), strict=True)
    }
    return {"status": "finished", **counts, **{f"top{k}_error": errors[f"top{k}_error"] for k in TOPS}, **ends}


def group_of(row: Row) -> tuple[str, ...]:
    """Return what runs have in common whose errors can be compared: the images, their classes and the protocol."""
    return tuple(row[key] or "" for key in ("dataset", "fingerprint", "selection", "restriction", "protocol"))


def _place(row: Row) -> tuple[Any, ...]:
    error = row["top1_error"]
    return row["status"] == "damaged", group_of(row), error is None, error or 0, row["run"]


def runs_csv(rows: Iterable[Row]) -> bytes:
    """Return the rows as CSV, with empty cells where there is no number."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode("utf-8", errors="backslashreplace")


def cells(row: Row) -> dict[str, str]:
    """Return the texts of a row that people read; the errors are empty where there are none."""
    versions = (each for each in (row["versions"] or "").split(", ") if each.partition(" ")[0] not in _USUAL)
    speed, date = row["images_per_second"], row["date"]
    dataset = [row["dataset"], row["selection"], row["restriction"], f"{row['images'] or 0:,} images"]
    return {
        "dataset": ", ".join(filter(None, dataset)),
        **{f"top{k}": error_with_interval(_interval(row, k), k) if row["evaluated"] else "" for k in TOPS},
        "refused": f"{row['refused']:,} refused" if row["refused"] else "",
        "state": "no image evaluated" if row["evaluated"] == 0 else f"{row['status']}: {row['problem']}",
        "speed": "–" if speed is None else f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}",
        "computed": f"{row['provider']} {row['precision']}",
        "versions": ", ".join(versions),
        "date": "–" if date is None else date[:16].replace("T", " "),
    }


def _interval(row: Row, k: int) -> Mapping[str, Any]:
    return {f"top{k}_error": row[f"top{k}_error"], f"top{k}_interval": [row[f"top{k}_low"], row[f"top{k}_high"]]}


def render_runs(rows: Sequence[Row], name: str, link: Callable[[str], str] | None) -> bytes:
    """Return the table as a page.

    name: of the folder; link: returns the address of a report, given its path below the folder; None for no links.
    """
    readable = [row for row in rows if row["status"] != "damaged"]
    groups = list(dict.fromkeys(map(group_of, readable)))
    reach = {k: max((row[f"top{k}_high"] for row in readable if row["evaluated"]), default=100.0) for k in TOPS}
    return render_html(
        "runs.html.j2",
        name=name,
        rows=[(row, cells(row), groups.index(group_of(row))) for row in readable],
        sort_values=[  # of the columns, for runs.js; that of the dataset is the place of its group
            {
                **{"model": row["model"], "dataset": groups.index(group_of(row)), "protocol": row["protocol"]},
                **{f"top{k}": row[f"top{k}_error"] for k in TOPS},
                **{"speed": row["images_per_second"], "computed": cells(row)["computed"], "date": row["date"]},
            }
            for row in readable
        ],
        damaged=[row for row in rows if row["status"] == "damaged"],
        tops=TOPS,
        reach=reach,
        link=link,
    )
