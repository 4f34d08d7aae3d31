"""Evaluate a model on a labelled dataset, chunk by chunk, into a run folder that can be resumed.

A chunk is evaluated in parts, so small that their views fit into memory whatever the images are. While the session
computes one part, threads decode and resize the next; no more than these two are in memory.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evaluator.contract import ModelContract
from evaluator.datasets.sample import UNLABELLED, Dataset, DatasetPlace, Sample
from evaluator.engine.classify import Classified, Model, combine, run_views
from evaluator.errors import ContractError, DatasetError, EnvironmentFault, ImageError, Interrupted, UsageError
from evaluator.imaging.decode import decode_rgb
from evaluator.imaging.views import ViewImage, make_views
from evaluator.progress import progress
from evaluator.protocols import Protocol
from evaluator.validation.predictions import Prediction, prediction_of
from evaluator.validation.run import CHUNK, Run, RunInfo, read_run
from evaluator.validation.run_log import RESUMED, STARTED, place_to_log
from evaluator.validation.writer import RunWriter, open_run

MAX_THREADS = 16  # beyond, the threads wait for the interpreter more than they decode
PART_BYTES = 3 * 2**27  # of the views of one part, if every image were as elongated as the protocol lets it be

Prepared = list[ViewImage] | ImageError  # one image, ready for the session or refused
ChunkResult = tuple[list[Prediction], npt.NDArray[np.float32]]  # lines and rows of scores
# Who evaluates: gives the result of each chunk of samples that it is handed, in their order.
Evaluation = Callable[[Sequence[Sequence[Sample]]], Generator[ChunkResult, None, None]]


class WorkersLost(Exception):  # noqa: N818 - becomes an EnvironmentFault that says how much is done
    """The machines that evaluate are gone, with the reason."""


def validate(
    session: Model,
    dataset: Dataset,
    info: RunInfo,
    folder: Path,
    *,
    fresh: bool = False,
    threads: int = 0,
    elsewhere: Evaluation | None = None,
    announce: Callable[[str], None] = lambda _message: None,
) -> Run:
    """Evaluate every image of a run, or those that an earlier call with the same arguments left undone.

    info: `run_info` of this session and dataset; folder: of the run, made if missing; fresh: start anew;
    threads: that decode and resize, 0 for one per core; elsewhere: evaluates the chunks instead of this session, as
    `cluster.on_ray` does; announce: told in one sentence where the run starts.
    An image that cannot be decoded is recorded as refused, with the reason.
    Raises DatasetError when a label is not a class of the model, RunFolderError when the folder holds anything else,
    Interrupted on Ctrl-C or SIGTERM, EnvironmentFault when the disk is full or the machines elsewhere are lost,
    ContractError when the model gives NaN.
    """

    def here(chunks: Sequence[Sequence[Sample]]) -> Generator[ChunkResult, None, None]:
        return evaluate_chunks(session, dataset, info.protocol, chunks, threads)

    _check_labels(dataset, session.contract)
    samples, total = _own_samples(dataset, info), info.images
    with open_run(folder, info, samples, fresh=fresh) as writer, _resumable(writer, total):
        if writer.done == total:
            announce(f"{folder}: finished already; nothing to do")
        else:
            announce(f"{folder}: going on after {writer.done} of {total} images" if writer.done else f"{folder}: new")
            writer.log(
                RESUMED if writer.done else STARTED,
                done=writer.done,
                **place_to_log(dataset.place or DatasetPlace(dataset.location)),
                device=session.circumstances.provider,
            )
            chunks = [samples[start : start + info.chunk] for start in range(writer.done, total, info.chunk)]
            with closing((elsewhere or here)(chunks)) as results:  # stopped at once, not when nobody refers to it
                _write(results, writer, total)
    return read_run(folder)


def _own_samples(dataset: Dataset, info: RunInfo) -> Sequence[Sample]:
    """Return the samples that belong to a run: all, or those of its shard."""
    first, end = info.span
    if first == end:
        raise UsageError(
            f"shard {info.shard and '/'.join(map(str, info.shard))} is empty: {info.dataset['images']} images are "
            f"{-(-info.dataset['images'] // info.chunk)} chunks of {info.chunk}. Take fewer shards"
        )
    return dataset.samples[first:end]


def _check_labels(dataset: Dataset, contract: ModelContract) -> None:
    """Refuse samples whose true class the model does not have: no error could be counted for them."""
    if not dataset.samples:
        raise DatasetError(f"{dataset.location}: holds no images, so there is nothing to evaluate")
    for sample in dataset.samples:
        if sample.label != UNLABELLED and not 0 <= sample.label < len(contract.classes):
            raise DatasetError(
                f"{dataset.location}: the label of {sample.file} ({sample.label}) is none of the model's "
                f"{len(contract.classes)} classes. Give a dataset whose class folders are the model's classes"
            )


@contextmanager
def _resumable(writer: RunWriter, total: int) -> Iterator[None]:
    """Turn Ctrl-C and lost machines into errors that say how much is done."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"{writer.folder}: interrupted; {writer.done} of {total} images are done. "
            "The same command goes on from there"
        ) from error
    except WorkersLost as error:
        raise EnvironmentFault(
            f"{writer.folder}: {error}. {writer.done} of {total} images are done and safe. Mend that, and the same "
            "command goes on from there"
        ) from error


def _write(results: Iterator[ChunkResult], writer: RunWriter, total: int) -> None:
    """Write each chunk as it comes; total: images of the run."""
    with progress("validate", total, "images", done=writer.done) as advance:
        begun = time.monotonic()
        for predictions, scores in results:
            index = writer.done // writer.chunk
            writer.append(predictions, scores)
            now = time.monotonic()
            writer.log("chunk", index=index, images=len(predictions), seconds=round(now - begun, 3))
            begun = now
            advance(len(predictions))


def evaluate_chunks(
    session: Model, dataset: Dataset, protocol: Protocol, chunks: Sequence[Sequence[Sample]], threads: int
) -> Generator[ChunkResult, None, None]:
    """Evaluate chunks of a dataset on this session, in their order; threads: see `validate`.

    Yields the lines of each chunk and its rows of scores, float32 (images, classes), NaN where refused.
    """
    size = part_size(protocol)
    parts = [chunk[start : start + size] for chunk in chunks for start in range(0, len(chunk), size)]
    with closing(_prefetched(parts, lambda sample: _prepare(dataset, sample, protocol), threads)) as ready:
        for chunk in chunks:
            classified: list[Classified | ImageError] = []
            for start in range(0, len(chunk), size):
                classified += _classify_part(session, protocol, chunk[start : start + size], next(ready))
            yield _to_write(chunk, classified, len(session.contract.classes))


def part_size(protocol: Protocol) -> int:
    """Return how many images of a chunk are prepared and computed at a time.

    A function of the protocol and of nothing else: in which company an image is computed can move the last bit of
    its scores, so that a chunk must be cut alike wherever and whenever it is evaluated.
    """
    if protocol.crop is not None:
        pixels = len(protocol.views) * protocol.crop**2
    else:
        pixels = sum(scale * scale * protocol.long_side_cap for scale in protocol.scales)  # mirrored ones share them
    parts = -(-CHUNK // max(1, PART_BYTES // (3 * pixels)))
    return -(-CHUNK // parts)


def _prefetched(
    parts: Sequence[Sequence[Sample]], prepare: Callable[[Sample], Prepared], threads: int
) -> Generator[list[Prepared], None, None]:
    """Yield the images of each part prepared, while threads prepare the part after it."""
    pool = ThreadPoolExecutor(min(threads or os.cpu_count() or 1, MAX_THREADS), thread_name_prefix="decode")
    try:
        upcoming = [pool.submit(prepare, sample) for sample in parts[0]]
        for number in range(1, len(parts) + 1):
            waiting = upcoming
            upcoming = [pool.submit(prepare, sample) for sample in (parts[number] if number < len(parts) else ())]
            prepared = [future.result() for future in waiting]
            del waiting  # the futures hold the pixels too
            yield prepared
            del prepared  # before the part after the next is begun
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare(dataset: Dataset, sample: Sample, protocol: Protocol) -> Prepared:
    """Read, decode and resize one image; runs in a thread."""
    try:
        return make_views(decode_rgb(dataset.read(sample), apply_exif=protocol.apply_exif), protocol)
    except ImageError as error:
        return error


def _classify_part(
    session: Model, protocol: Protocol, part: Sequence[Sample], prepared: Sequence[Prepared]
) -> list[Classified | ImageError]:
    """Classify the images of a part; their views share batches."""
    views = [view for of_image in prepared if not isinstance(of_image, ImageError) for view in of_image]
    results = iter(run_views(session, views))
    classified: list[Classified | ImageError] = []
    for sample, of_image in zip(part, prepared, strict=True):
        if isinstance(of_image, ImageError):
            classified.append(of_image)
            continue
        try:
            classified.append(combine(protocol, list(islice(results, len(of_image)))))
        except ContractError as error:
            raise ContractError(f"{sample.file}: {error}") from error
    return classified


def _to_write(chunk: Sequence[Sample], classified: Sequence[Classified | ImageError], classes: int) -> ChunkResult:
    """Return the lines of a chunk and its rows of scores, NaN where refused."""
    scores = np.full((len(chunk), classes), np.nan, np.float32)
    predictions = []
    for row, sample, result in zip(scores, chunk, classified, strict=True):
        if isinstance(result, ImageError):
            predictions.append(Prediction(sample.file, sample.label, refused=str(result)))
        else:
            row[:] = result.scores
            predictions.append(prediction_of(sample.file, sample.label, result))
    return predictions, scores
