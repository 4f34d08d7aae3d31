"""An evaluated dataset in a Python program, and the comparison of two."""

import os
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import EnvironmentFault
from ..reporting.compare_page import WrittenComparison, write_comparison
from ..reporting.html import notebook_link
from ..reporting.report import Report, headline
from ..reporting.report_page import write_report
from ..validation.predictions import TOP_CLASSES
from ..validation.run import read_run

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
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
    report: Report = field(repr=False)

    def __str__(self) -> str:
        return headline(self.report)

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
        warning = f"<p>warning: {escape(self.report['suspicion'])}</p>" if self.report["suspicion"] else ""
        link = "" if self.html is None else notebook_link(self.html)
        return f"<p>{escape(str(self))}</p>{warning}{link}"


def write_evaluation(folder: Path) -> Evaluation:
    """Write the report of a finished run. Raises as `write_report` does."""
    written = write_report(folder)
    errors = {key: written.report[key] for key in ("top1_error", "top1_interval", "top5_error", "top5_interval")}
    return Evaluation(folder, written.html, **errors, report=written.report)


def compare(
    a: Evaluation | str | os.PathLike[str],
    b: Evaluation | str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
) -> WrittenComparison:
    """Compare run B with run A, the baseline, and write the page, as `prelunet compare` does.

    a, b: evaluations, or folders of finished runs on the same images; output: folder for the files, None for
    B/report/compared-with-NAME-OF-A; data: folder or archive of the images, None to look where the runs found them.
    Raises as `write_comparison` does.
    """
    runs = [each.folder if isinstance(each, Evaluation) else Path(each) for each in (a, b)]
    places = [None if each is None else Path(each) for each in (output, data)]
    return write_comparison(*runs, out=places[0], data=places[1])
