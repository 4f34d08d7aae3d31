"""Merge the shards of a run into the run that a single machine would have written, byte for byte.

Before anything is written, every image must come from exactly one shard, and every shard must be finished and
undamaged. The merged run is written like any run, so a killed merge leaves an unfinished run, which the same command
finishes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from ..datasets.dataset import Sample
from ..errors import RunFolderError
from ..files import check_not_input
from ..json_checks import differences, format_differences
from ..terminal import progress
from .run import Run, RunInfo, read_run, read_run_info
from .stored_runs import BLOCK, check_scores, log_start, read_rows
from .writer import DESCRIPTIVE_KEYS, open_run

_SHARD_SPECIFIC_KEYS = {("shard", "number"), *DESCRIPTIVE_KEYS}  # keys in which shards of a run may differ
_SHOWN = 10  # maximum number of missing shards in a message

Shard = tuple[Path, RunInfo]


def merge(
    folders: Sequence[Path], folder: Path, *, fresh: bool = False, report: Callable[[str], None] = lambda _text: None
) -> Run:
    """Merge finished shards, in any order, into one run folder, or resume an earlier call that was killed.

    folder: of the merged run; fresh: start over; report: receives one sentence on where the merge starts.
    The lines of all shards, one block of the scores and, at the end, the lines of the merged run are in memory.
    Raises RunFolderError when a shard is missing, duplicate, unfinished, damaged or of another run, or when the folder
    contains anything but this run. Raises EnvironmentFault when it is not writable.
    """
    check_not_input(folder, folders)  # --fresh would delete it
    shards = _sort_shards([(path, read_run_info(path)) for path in folders])
    runs = [read_run(path) for path, _ in shards]
    samples: list[Sample] = []
    for run in runs:
        check_scores(run)
        samples += [Sample(line.file, line.label, 0, line.also) for line in run.predictions]
    info = replace(shards[0][1], shard=None)
    step = max(BLOCK // info.chunk, 1) * info.chunk  # whole chunks
    with open_run(folder, info, samples, fresh=fresh) as writer:
        log_start(writer, info.images, [path for path, _ in shards], report)
        with progress("merge", info.images, "images", done=writer.done) as advance:
            for run in runs:
                start, end = run.info.span
                while writer.done < end:
                    first = writer.done - start
                    lines = run.predictions[first : first + step]
                    writer.append(lines, read_rows(run, first, first + len(lines)))
                    advance(len(lines))
    return read_run(folder)


def _sort_shards(shards: Sequence[Shard]) -> list[Shard]:
    """Return the shards by number. Raises RunFolderError unless they are all shards of one run, each exactly once."""
    for path, info in shards:
        if info.shard is None:
            raise RunFolderError(
                f"{path}: a complete run, not a shard. Pass folders created with prelunet validate --shard NUMBER/OF"
            )
    (first, one), *others = shards
    for path, info in others:
        places = (f"in {first}", f"in {path}")
        if found := differences(one.to_json(), info.to_json(), ignored=_SHARD_SPECIFIC_KEYS, places=places):
            raise RunFolderError(
                f"{path}: not a shard of the same run as {first}:\n{format_differences(found)}\n"
                "Remove it, or repeat it with the model, data, options and versions of the others"
            )
    for path, info in shards:
        if not info.images:
            raise RunFolderError(f"{path}: shard {_name(info)} of this run has no images. Remove it")
    ordered = sorted(shards, key=lambda shard: shard[1].shard or (0, 0))
    for (before, info), (path, again) in pairwise(ordered):
        if info.shard == again.shard:
            raise RunFolderError(
                f"{path}: is shard {_name(again)}, as is {before}; its images would count twice. Pass only one of them"
            )
    path, info = ordered[0]
    if missing_images := info.dataset["images"] - sum(shard.images for _, shard in ordered):
        missing = _missing([shard for _, shard in ordered])
        names = ", ".join([*missing[:_SHOWN], *["..."] * (len(missing) > _SHOWN)])
        raise RunFolderError(
            f"missing: {names}, {missing_images:,} of {info.dataset['images']:,} images. Create each with the command "
            f"of {path}, but its own number and folder: --shard {missing[0]} --run DIR"
        )
    return ordered


def _missing(infos: Sequence[RunInfo]) -> list[str]:
    """Return the names of the missing shards that have images: with more shards than chunks, some are empty."""
    there, (_, of) = {info.shard for info in infos}, infos[0].shard or (1, 1)
    others = (replace(infos[0], shard=(number, of)) for number in range(1, of + 1) if (number, of) not in there)
    return [_name(info) for info in others if info.images]


def _name(info: RunInfo) -> str:
    """Return the name of a shard as on the command line: 2/7."""
    assert info.shard is not None, "checked before"
    return "{}/{}".format(*info.shard)
