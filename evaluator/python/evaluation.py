"""An evaluated dataset in a Python program, and the comparison of two."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cards import BLUE, ORANGE, bar, card, heading, line, pictures, table
from ..errors import EnvironmentFault
from ..reporting.compare import METRICS, judgment
from ..reporting.compare_page import WrittenComparison, most_changed_classes, remarks, run_titles, write_comparison
from ..reporting.gallery import Mistake
from ..reporting.html import notebook_link, signed
from ..reporting.report import Report, error_with_interval, headline
from ..reporting.report_page import write_report
from ..reporting.tables import worst_classes
from ..validation.predictions import TOP_CLASSES
from ..validation.run import read_run

if TYPE_CHECKING:
    import pandas as pd

_CLASSES_SHOWN, _PICTURES_SHOWN = 5, 12  # on a card


@dataclass(frozen=True, repr=False)
class Evaluation:
    """A finished run and its report.

    folder: of the run; html: report.html in it, None without the extra `report`; errors: in percent of the evaluated
    images; intervals: of 95 %, low and high; both None if there are no such images; report: the content of report.json
    (docs/report.schema.json).
    """

    folder: Path
    html: Path | None
    top1_error: float | None
    top1_interval: list[float] | None
    top5_error: float | None
    top5_interval: list[float] | None
    report: Report
    _mistakes: Sequence[Mistake] = field(default=(), compare=False)

    def __str__(self) -> str:
        return headline(self.report)

    def __repr__(self) -> str:
        return f"<Evaluation: {self._errors}>"

    @property
    def _errors(self) -> str:
        return str(self).partition(" | ")[0]

    def to_pandas(self) -> "pd.DataFrame":
        """Return a table with a row for each image, in the order of their names.

        file; label and name: index and name of the true class, the first of several; rank: of the true class, from 1;
        predicted: name of the best class; class_1, score_1 and so on to 5: index and score of the best classes; capped:
        whether a long side was cut to its center; refused: why the image was not evaluated. Such an image has neither
        rank nor prediction.
        Raises EnvironmentFault if pandas is not installed, RunFolderError if the run has been damaged since.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise EnvironmentFault(
                f"to_pandas needs pandas, which cannot be imported ({error}). Install it: pip install pandas"
            ) from error
        run = read_run(self.folder)
        classes = run.info.classes
        places = range(1, min(TOP_CLASSES, len(run.info.candidates or classes)) + 1)
        rows = [
            (
                *(image.file, image.label, classes[image.label].name, image.rank or None),
                classes[image.top[0][0]].name if image.top else None,
                *(value for found in image.top or [(None, None)] * len(places) for value in found),
                *(image.capped, image.refused),
            )
            for image in run.predictions
        ]
        best = [f"{what}_{place}" for place in places for what in ("class", "score")]
        table = pd.DataFrame(rows, columns=["file", "label", "name", "rank", "predicted", *best, "capped", "refused"])
        return table.astype(
            {"rank": "Int64"} | {name: "Int64" if name.startswith("class") else "float64" for name in best}
        )

    def _repr_html_(self) -> str:
        report, (errors, _, context) = self.report, str(self).partition(" | ")
        overall = {f"top-{k} error": (report, key, k) for key, k in METRICS.items() if report["evaluated"]}
        worst = worst_classes(report["classes"], "top1", _CLASSES_SHOWN)
        return card(
            f"Evaluation of {report['model']['file']}",
            context if overall else f"{errors} | {context}",
            line(f"warning: {report['suspicion']}" if report["suspicion"] else ""),
            table(_error_row(name, *of) for name, of in overall.items()),
            line(errors.partition(" of ")[2] if overall else ""),
            heading("Worst classes") if worst else "",
            table(_error_row(entry["name"], entry, "top1", 1, _taken_for(entry)) for entry in worst),
            heading("Mistakes, most confident first") if self._mistakes else "",
            _mistake_pictures(self._mistakes, report["classes"]),
            "" if self.html is None else notebook_link(self.html),
        )


def _error_row(name: str, errors: dict[str, Any], key: str, k: int, remark: str = "") -> list[str]:
    low, high = errors[f"{key}_interval"]
    drawn = bar(errors[f"{key}_error"] / 100, interval=(low / 100, high / 100))
    return [escape(name), error_with_interval(errors, k, unit=" %"), drawn, escape(remark)]


def _taken_for(entry: dict[str, Any]) -> str:
    found = entry["confusions"][0]
    return f"{found['count']:,} of {entry['evaluated']:,} taken for {found['name']}"


def _mistake_pictures(mistakes: Sequence[Mistake], classes: Sequence[dict[str, Any]]) -> str:
    """Return the images with true class and answer. classes: of the report or the comparison."""

    def tiles() -> Iterator[tuple[str | None, str, str]]:
        for mistake in mistakes[:_PICTURES_SHOWN]:
            index, score = mistake.prediction.top[0]
            text = f"{classes[mistake.prediction.label]['name']}, taken for {classes[index]['name']} ({score:.0%})"
            yield mistake.thumbnail, mistake.prediction.file, text

    return pictures(tiles())


@dataclass(frozen=True, repr=False)
class Comparison(WrittenComparison):
    """The comparison of run B with run A, the baseline, and its files.

    comparison: the content of compare.json (docs/compare.schema.json); its differences are points of error, B - A.
    """

    def __repr__(self) -> str:
        top1 = self.comparison["top1"]
        change = "" if top1["difference"] is None else f"top-1 error of B - A: {_points(top1)}, "
        return f"<Comparison: {change}{judgment(top1)}>"

    def _repr_html_(self) -> str:
        found, classes, names = self.comparison, self.comparison["classes"], run_titles(self.comparison)
        errors = [
            (f"top-{k} error", found[key], *(found[side][f"{key}_error"] for side in "ab"), judgment(found[key]))
            for key, k in METRICS.items()
            if found["evaluated"]
        ]
        changed = [
            (entry["name"], entry["top1"], entry["top1"]["a_error"], entry["top1"]["b_error"], "")
            for way in ("worse", "improved")
            for entry in most_changed_classes(found, "top1", way)[:_CLASSES_SHOWN]
        ]
        flips = {f"Wrong in {side} only": self._flipped[way] for side, way in (("B", "worse"), ("A", "better"))}
        return card(
            f"B: {names['b']}, compared with A: {names['a']}",
            f"{found['evaluated']:,} of {found['images']:,} images of {found['dataset']['name']}",
            *map(line, remarks(found)),
            table(_change_rows(errors)) or line(judgment(found["top1"])),
            heading("Classes that changed most, by top-1 error") if changed else "",
            table(_change_rows(changed)),
            *(
                heading(f"{title}: {gallery.total:,} images") + _mistake_pictures(gallery.mistakes, classes)
                for title, gallery in flips.items()
                if gallery.mistakes
            ),
            notebook_link(self.html),
        )


def _change_rows(changes: Iterable[tuple[str, dict[str, Any], float, float, str]]) -> Iterator[list[str]]:
    """Yield rows with bars from the middle. changes: name, figures of both runs, errors of A and B, remark."""
    changes = list(changes)
    width = 2 * max((abs(bound) for _, pair, *_ in changes for bound in pair["interval"]), default=0) or 1
    for name, pair, error_a, error_b, remark in changes:
        difference, (low, high) = pair["difference"], pair["interval"]
        drawn = bar(
            0.5 + difference / width,
            start=0.5,
            interval=(0.5 + low / width, 0.5 + high / width),
            color=ORANGE if difference > 0 else BLUE,
        )
        yield [escape(name), _points(pair), drawn, f"{error_a:.1f} → {error_b:.1f} %", escape(remark)]


def _points(pair: dict[str, Any]) -> str:
    low, high = pair["interval"]
    return f"{signed(pair['difference'])} points [{signed(low, 1)}, {signed(high, 1)}]"


def write_evaluation(folder: Path) -> Evaluation:
    """Write the report of a finished run. Raises as `write_report` does."""
    written = write_report(folder)
    errors = {key: written.report[key] for key in ("top1_error", "top1_interval", "top5_error", "top5_interval")}
    mistakes = written.mistakes[:_PICTURES_SHOWN]
    return Evaluation(folder, written.html, **errors, report=written.report, _mistakes=mistakes)


def compare(
    a: Evaluation | str | os.PathLike[str],
    b: Evaluation | str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
) -> Comparison:
    """Compare run B with run A, the baseline, and write the page, as `prelunet compare` does.

    a, b: evaluations, or folders of finished runs on the same images; output: folder for the files, None for
    B/report/compared-with-NAME-OF-A; data: folder or archive of the images, None to look where the runs found them.
    Raises as `write_comparison` does.
    """
    runs = [each.folder if isinstance(each, Evaluation) else Path(each) for each in (a, b)]
    places = [None if each is None else Path(each) for each in (output, data)]
    return Comparison(**vars(write_comparison(*runs, out=places[0], data=places[1])))
