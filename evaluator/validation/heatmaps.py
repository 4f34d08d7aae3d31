"""Heat maps of mistakes, stored in the run folder, so that a report needs no model to show them.

heatmaps.jsonl has a line for each image, in the order of `mistakes_as_shown`. It does not identify the run: it can be
added or extended later. A kill leaves at most one incomplete line, which does not count.
"""

import json
import os
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct, convert, to_builtins

from ..arrays import Float64Array
from ..datasets.dataset import Dataset, Sample
from ..engine.classify import classify_images
from ..engine.heatmap import apply_color_map, grid_size, heat_maps
from ..engine.session import Session
from ..errors import DatasetError, ImageError
from ..files import open_regular
from ..imaging.decode import decode_image
from ..json_checks import parse_json
from ..terminal import progress
from .mistakes import mistakes_as_shown
from .run import HEAT_MAPS_FILE, Run, RunInfo
from .writer import RunWriter

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
    path, wanted = writer.folder / HEAT_MAPS_FILE, mistakes_as_shown(run.predictions)[:count]
    stored, end = _read(path, run, None)
    if end:
        os.truncate(path, end)
    else:
        path.unlink(missing_ok=True)
    done = {maps.file for maps in stored}
    missing = [mistake for mistake in wanted if mistake.file not in done]
    if not missing:
        return
    samples = {sample.file: sample for sample in dataset.samples}
    with progress("heat maps", len(wanted), "images", done=len(wanted) - len(missing)) as advance:
        for mistake in missing:
            maps = _compute(session, dataset, samples[mistake.file], mistake.top[0][0], run.info)
            writer.append_heat_map((json.dumps(to_builtins(maps)) + "\n").encode())
            advance()


def _compute(session: Session, dataset: Dataset, sample: Sample, answer: int, info: RunInfo) -> MistakeMaps:
    protocol = info.protocol
    try:
        image = decode_image(dataset.read(sample), apply_exif=protocol.apply_exif, preparation=protocol.preparation)
    except ImageError as error:
        raise DatasetError(
            f"{dataset.location}: {sample.file} can no longer be read ({error}). Restore it, or repeat the run with "
            "--fresh"
        ) from error
    (classified,) = classify_images(session, [image], protocol, keep_windows=True)
    classified = classified.among(info.candidates)
    height, width = image.height, image.width
    rows, columns = grid_size((height, width))
    maps = heat_maps(classified, (answer, sample.label), (height, width), (rows, columns), session.contract, protocol)
    of_answer, of_label = map(quantize, maps)
    return MistakeMaps(sample.file, answer, sample.label, height, width, rows, columns, (of_answer, of_label))


def quantize(of_class: Float64Array) -> bytes:
    """Encode a heat map, (rows, columns) in 0..1, NaN where no view looked, as one byte for each point."""
    codes = np.round(STEPS * np.clip(of_class, 0, 1))  # half precision can exceed 1
    return np.where(np.isnan(codes), UNSEEN, codes).astype(np.uint8).tobytes()


def map_colors() -> list[list[int]]:
    """Return red, green and blue, 0 to 255, of each byte of a heat map but UNSEEN."""
    colors: list[list[int]] = apply_color_map(np.linspace(0, 1, STEPS + 1)).round().astype(int).tolist()
    return colors


def read_heat_maps(run: Run, most: int) -> list[MistakeMaps]:
    """Return the first heat maps of a run, up to `most` and up to the first damaged one; none if it has none."""
    return [] if run.folder is None else _read(run.folder / HEAT_MAPS_FILE, run, most)[0]


def _read(path: Path, run: Run, most: int | None) -> tuple[list[MistakeMaps], int]:
    """Return the heat maps before the first line that is damaged or still being written, and where they end in bytes.

    A missing file has no lines. most: number of lines to read.
    """
    stored, end = list[MistakeMaps](), 0
    if not path.exists():
        return stored, end
    mistakes = {p.file: (p.top[0][0], p.label) for p in run.predictions if p.rank > 1}
    with open_regular(path) as lines, suppress(ValueError):
        for line in islice(lines, most):
            maps = convert(parse_json(line, file_names=True), MistakeMaps)
            if not line.endswith(b"\n") or mistakes.pop(maps.file, None) != (maps.answer, maps.label):
                break
            stored.append(maps)
            end += len(line)
    return stored, end
