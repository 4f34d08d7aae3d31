"""Join the shards of a run to the run that one machine would have made, byte for byte.

The rules: every image comes from just one shard, and each shard is finished and undamaged, before anything is written;
the merged run is written as any run is, so that a killed merge leaves an unfinished run which the same command
finishes; and in the end the merged run is read again and compared with every shard.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from shlex import join

import numpy as np

from prelunet.evaluator.datasets.dataset import Sample
from prelunet.evaluator.errors import RunFolderError
from prelunet.evaluator.json_checks import differences, format_differences
from prelunet.evaluator.protocols import command_line_options
from prelunet.evaluator.terminal import escape_unprintable, progress
from prelunet.evaluator.validation.run import Run, RunInfo, read_run, read_run_info
from prelunet.evaluator.validation.run_log import find_dataset
from prelunet.evaluator.validation.stored_runs import BLOCK, check_scores, log_start, read_rows, refuse_source_as_target
from prelunet.evaluator.validation.writer import DESCRIPTIVE_KEYS, RunWriter, open_run

_SHARD_SPECIFIC_KEYS = {("shard", "number"), *DESCRIPTIVE_KEYS}  # in which shards of one run differ, or may
_SHOWN = 10  # missing shards

Shard = tuple[Path, RunInfo]


def merge(
    folders: Sequence[Path], folder: Path, *, fresh: bool = False, report: Callable[[str], None] = lambda _text: None
) -> Run:
    """Join finished shards, given in any order, into one run folder; an earlier call that was killed is gone on with.

    folder: of the merged run; fresh: start it anew; announce: told in one sentence where the merge starts.
    In memory are the lines of all shards, of the scores a block, and in the end the lines of the merged run.
    Raises RunFolderError when a shard is missing, doubled, unfinished, damaged or of another run, or when the folder
    holds anything but this very run; EnvironmentFault when it cannot be written.
    """
    refuse_source_as_target(folders, folder)
    shards = _sort_shards([(path, read_run_info(path)) for path in folders])
    runs = [read_run(path) for path, _ in shards]
    samples = _samples(runs)
    info = replace(shards[0][1], shard=None)
    with open_run(folder, info, samples, fresh=fresh) as writer:
        log_start(writer, info.images, [path for path, _ in shards], report)
        _copy(runs, writer)
    merged = read_run(folder)
    for run in runs:
        _check_copied(run, merged)
    return merged


def _sort_shards(shards: Sequence[Shard]) -> list[Shard]:
    """Return the shards by number; RunFolderError when they are not all shards of one run, each there once."""
    for path, info in shards:
        if info.shard is None:
            raise RunFolderError(
                f"{path}: a whole run, not a shard of one. Give the folders that were made with "
                "prelunet validate --shard NUMBER/OF"
            )
    (first, one), *others = shards
    for path, info in others:
        places = (f"in {first}", f"in {path}")
        if found := differences(one.to_json(), info.to_json(), ignored=_SHARD_SPECIFIC_KEYS, places=places):
            raise RunFolderError(
                f"{path}: not a shard of the same run as {first}:\n{format_differences(found)}\n"
                "Leave it out, or make it again with the model, data, options and versions of the others"
            )
    for path, info in shards:
        if not info.images:
            raise RunFolderError(f"{path}: shard {_name(info)} of this run has no images. Leave it out")
    ordered = sorted(shards, key=lambda shard: shard[1].shard or (0, 0))
    for (before, info), (path, again) in pairwise(ordered):
        if info.shard == again.shard:
            raise RunFolderError(
                f"{path}: is shard {_name(again)}, and so is {before}; its images would count twice. Give one of them"
            )
    _refuse_missing(ordered)
    return ordered


def _refuse_missing(ordered: Sequence[Shard]) -> None:
    """Refuse a gap, with the command that fills it."""
    path, info = ordered[0]
    missing_images = info.dataset["images"] - sum(shard.images for _, shard in ordered)
    if not missing_images:  # where there are more shards than chunks some are empty, and nothing is missing with them
        return
    missing = list(islice(_missing(ordered), _SHOWN + 1))
    names = ", ".join([*(f"{number}/{of}" for number, of in missing[:_SHOWN]), *["..."] * (len(missing) > _SHOWN)])
    raise RunFolderError(
        f"missing: {names}, {missing_images:,} of {info.dataset['images']:,} images. Make each with the command that made "
        f"{path}, but with its own number and folder: {_command(path, info, missing[0])}"
    )


def _missing(ordered: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    """Yield the shards that are not there and have images; goes from chunk to chunk: of may be large."""
    there = {shard.shard for _, shard in ordered}
    info = ordered[0][1]
    assert info.shard is not None, "checked before"
    chunks, of, chunk = -(-info.dataset["images"] // info.chunk), info.shard[1], 0
    while chunk < chunks:
        number = -(-(chunk + 1) * of // chunks)  # the first shard that ends behind this chunk
        if (number, of) not in there:
            yield number, of
        chunk = number * chunks // of


def _command(path: Path, info: RunInfo, shard: tuple[int, int]) -> str:
    """Return the command that makes another shard of a run, with what the log of this one tells of its dataset."""
    spec = find_dataset(path)
    words = ["prelunet", "validate", "--model", info.model["file"]]
    words += ["--data", info.dataset["name"] if spec is None else str(spec.path)]
    if spec is not None:
        words += ["--labels", str(spec.labels)] if spec.labels is not None else []
        words += ["--no-labels"] if spec.no_labels else []
        words += ["--limit", str(spec.limit)] if spec.limit is not None else []
        words += ["--classes", ",".join(spec.classes)] if spec.classes else []
    words += [*command_line_options(info.protocol), "--shard", "/".join(map(str, shard)), "--run", "DIR"]
    return join(words)


def _name(info: RunInfo) -> str:
    """Return a shard as the command line has it: 2/7."""
    assert info.shard is not None, "a whole run has no number"
    return "{}/{}".format(*info.shard)


def _samples(runs: Sequence[Run]) -> list[Sample]:
    """Return all images in their order, without their sizes; refuses a shard that is damaged."""
    samples: list[Sample] = []
    for run in runs:
        check_scores(run)
        if samples and run.predictions[0].file <= samples[-1].file:
            raise RunFolderError(
                f"{run.where}: its first image ({escape_unprintable(run.predictions[0].file)}) should come after the last of "
                f"the shard before it ({escape_unprintable(samples[-1].file)}). One of them is damaged: do it anew with its "
                "command and --fresh"
            )
        samples += [Sample(line.file, line.label, 0) for line in run.predictions]
    return samples


def _copy(runs: Sequence[Run], writer: RunWriter) -> None:
    """Write what the merged run lacks, some chunks at a time."""
    total = runs[-1].info.span[1]
    step = max(BLOCK // writer.chunk, 1) * writer.chunk
    with progress("merge", total, "images", done=writer.done) as advance:
        for run in runs:
            start, end = run.info.span
            while writer.done < end:
                first = writer.done - start
                lines = run.predictions[first : first + step]
                writer.append(lines, read_rows(run, first, first + len(lines)))
                advance(len(lines))


def _check_copied(shard: Run, merged: Run) -> None:
    """Compare a shard with its part of the merged run, bit by bit."""
    start, end = shard.info.span
    for first in range(0, end - start, BLOCK):
        last = min(first + BLOCK, end - start)
        same = list(shard.predictions[first:last]) == list(merged.predictions[start + first : start + last])
        rows, copied = read_rows(shard, first, last), read_rows(merged, start + first, start + last)
        if not same or not np.array_equal(rows.view(np.uint32), copied.view(np.uint32)):
            raise RunFolderError(
                f"{merged.folder}: images {start + first} to {start + last - 1} are not those of {shard.folder}. One "
                "of them was changed or damaged: merge again with --fresh"
            )
