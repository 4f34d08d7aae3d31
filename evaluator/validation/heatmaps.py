"""Heat maps of mistakes, stored in the run folder, so that a report needs no model to show them.

heatmaps.jsonl has a line for each of the first mistakes in the order of `mistakes_as_shown`. It is no part of the run's
identity: a finished run can get it later, and longer. A kill leaves at most one incomplete line, which does not count.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct, convert, to_builtins

from prelunet.evaluator.arrays import Float64Array
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.heatmap import heat_maps
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import DatasetError, ImageError, RunFolderError
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.json_checks import parse_json
from prelunet.evaluator.protocols import EvaluationProtocol
from prelunet.evaluator.terminal import progress
from prelunet.evaluator.validation.mistakes import mistakes_as_shown
from prelunet.evaluator.validation.predictions import Prediction, open_regular
from prelunet.evaluator.validation.run import HEAT_MAPS_FILE, Run
from prelunet.evaluator.validation.writer import RunWriter

# Points of a map along the longer side of its image. At scale 480, a 4:3 image has 640 pixels there, so one point every
# 23; the windows, 224 pixels wide, are 16 apart and hardly differ from their neighbors. Its two maps take 1.6 kB.
LONGER_SIDE = 28
MAX_SIDE = 64  # accepted when reading
STEPS, UNSEEN = 254, 255  # a byte is STEPS times the score, or UNSEEN where no view looked

_Index = Annotated[int, Meta(ge=0, lt=2**31)]  # of a class
_Pixels = Annotated[int, Meta(ge=1, lt=2**31)]
_Points = Annotated[int, Meta(ge=1, le=MAX_SIDE)]


class MistakeMaps(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the model sees its answer and the true class of a misclassified image: a line of heatmaps.jsonl.

    height, width: of the image in pixels; maps: of the answer and of the label, uint8 (rows, columns) as bytes, which
    cover the whole image.
    """

    file: str
    answer: _Index
    label: _Index
    height: _Pixels
    width: _Pixels
    rows: _Points
    columns: _Points
    maps: tuple[bytes, bytes]

    def __post_init__(self) -> None:
        if any(len(of_class) != self.rows * self.columns for of_class in self.maps):
            raise ValueError(f"maps should have {self.rows}x{self.columns} bytes")


def store_heat_maps(session: Session, dataset: Dataset, run: Run, count: int, writer: RunWriter) -> None:
    """Store the heat maps of the first `count` mistakes of a finished run, except those that its folder has.

    writer: of the run, open. What is damaged is computed again. Raises DatasetError if an image can no longer be read.
    """
    path, mistakes = writer.folder / HEAT_MAPS_FILE, mistakes_as_shown(run.predictions)
    ends = [0]
    with suppress(RunFolderError):  # a damaged line
        for _, end in _read(path, mistakes):
            ends.append(end)
    if path.exists() and path.stat().st_size != ends[-1]:
        os.truncate(path, ends[-1])
    done, wanted = len(ends) - 1, mistakes[:count]
    if done >= len(wanted):
        return
    samples = {sample.file: sample for sample in dataset.samples}
    with progress("heat maps", len(wanted), "images", done=done) as advance:
        for mistake in wanted[done:]:
            maps = _compute(session, dataset, samples[mistake.file], mistake.top[0][0], run.info.protocol)
            writer.append_heat_map((json.dumps(to_builtins(maps)) + "\n").encode())
            advance()


def _compute(
    session: Session, dataset: Dataset, sample: Sample, answer: int, protocol: EvaluationProtocol
) -> MistakeMaps:
    try:
        image = decode_image(dataset.read(sample), apply_exif=protocol.apply_exif)
    except ImageError as error:
        raise DatasetError(
            f"{dataset.location}: {sample.file} can no longer be read ({error}). Restore it, or repeat the run with "
            "--fresh"
        ) from error
    (classified,) = classify_images(session, [image], protocol, keep_windows=True)
    height, width = image.height, image.width
    rows, columns = (max(1, round(LONGER_SIDE * side / max(height, width))) for side in (height, width))
    maps = heat_maps(classified, (answer, sample.label), (height, width), (rows, columns), session.contract, protocol)
    of_answer, of_label = map(quantize, maps)
    return MistakeMaps(sample.file, answer, sample.label, height, width, rows, columns, (of_answer, of_label))


def quantize(of_class: Float64Array) -> bytes:
    """Encode a heat map, (rows, columns) in 0..1, NaN where no view looked, as one byte for each point."""
    codes = np.round(STEPS * np.clip(of_class, 0, 1))  # half precision can exceed 1
    return np.where(np.isnan(codes), UNSEEN, codes).astype(np.uint8).tobytes()


def read_heat_maps(run: Run) -> list[MistakeMaps]:
    """Return the heat maps of a run, in the order in which a report shows them; none if it has none.

    Strict, because run folders are untrusted. Raises RunFolderError with the number of a damaged line.
    """
    if run.folder is None:
        return []
    return [maps for maps, _ in _read(run.folder / HEAT_MAPS_FILE, mistakes_as_shown(run.predictions))]


def _read(path: Path, mistakes: Sequence[Prediction]) -> Iterator[tuple[MistakeMaps, int]]:
    """Yield each line and its end in bytes, up to one that is still being written. A missing file has no lines."""
    if not os.path.lexists(path):
        return
    end = 0
    with open_regular(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                maps = convert(parse_json(line), MistakeMaps)
                expected = [(m.file, m.top[0][0], m.label) for m in mistakes[number - 1 : number]]
                if [(maps.file, maps.answer, maps.label)] != expected:
                    raise ValueError(f"file, answer and label should be those of the run's mistake {number}")
            except ValueError as error:
                raise RunFolderError(
                    f"{path}: line {number} is damaged ({error}). Delete the file, or run the command of this run "
                    "again with --heatmaps to repeat the maps from there"
                ) from error
            end += len(line)
            yield maps, end
