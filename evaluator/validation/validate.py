"""Evaluate a model on a labelled dataset, chunk by chunk, into a run folder that can be resumed.

While the session computes one chunk, threads decode and resize the next; no more than these two are in memory.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evaluator.contract import ModelContract
from evaluator.datasets.sample import Dataset, Sample
from evaluator.engine.classify import Classified, Model, combine, run_views
from evaluator.errors import ContractError, DatasetError, ImageError, Interrupted
from evaluator.imaging.decode import decode_rgb
from evaluator.imaging.views import ViewImage, make_views
from evaluator.progress import progress
from evaluator.protocols import Protocol
from evaluator.validation.run import (
    RESUMED,
    STARTED,
    Prediction,
    Run,
    describe_dataset,
    prediction_of,
    read_run,
    run_info,
)
from evaluator.validation.writer import RunWriter, open_run

MAX_THREADS = 16  # beyond, the threads wait for the interpreter more than they decode

Prepared = list[ViewImage] | ImageError  # one image, ready for the session or refused


def validate(
    session: Model,
    model_file: str,
    dataset: Dataset,
    protocol: Protocol,
    folder: Path,
    *,
    fresh: bool = False,
    threads: int = 0,
    announce: Callable[[str], None] = lambda _message: None,
) -> Run:
    """Evaluate every image of a dataset, or those that an earlier call with the same arguments left undone.

    model_file: last component of the model's path; folder: of the run, made if missing; fresh: start anew;
    threads: that decode and resize, 0 for one per core; announce: told in one sentence where the run starts.
    An image that cannot be decoded is recorded as refused, with the reason.
    Raises DatasetError when a label is not a class of the model, RunFolderError when the folder holds anything else,
    Interrupted on Ctrl-C or SIGTERM, EnvironmentFault when the disk is full, ContractError when the model gives NaN.
    """
    _check_labels(dataset, session.contract)
    total = len(dataset.samples)
    info = run_info(session, model_file, describe_dataset(dataset), protocol)
    with open_run(folder, info, dataset.samples, fresh=fresh) as writer, _resumable(writer, total):
        if writer.done == total:
            announce(f"{folder}: finished already; nothing to do")
        else:
            announce(f"{folder}: going on after {writer.done} of {total} images" if writer.done else f"{folder}: new")
            writer.log(
                RESUMED if writer.done else STARTED,
                done=writer.done,
                dataset=str(dataset.location.resolve()),
                device=session.circumstances.provider,
            )
            chunks = [dataset.samples[start : start + info.chunk] for start in range(writer.done, total, info.chunk)]
            _evaluate(session, dataset, protocol, chunks, writer, threads)
    return read_run(folder)


def _check_labels(dataset: Dataset, contract: ModelContract) -> None:
    """Refuse samples without a true class: no error can be counted for them."""
    if not dataset.samples:
        raise DatasetError(f"{dataset.location}: holds no images, so there is nothing to evaluate")
    for sample in dataset.samples:
        if not 0 <= sample.label < len(contract.classes):
            raise DatasetError(
                f"{dataset.location}: the label of {sample.file} ({sample.label}) is none of the model's "
                f"{len(contract.classes)} classes. Give a dataset whose class folders are the model's classes"
            )


@contextmanager
def _resumable(writer: RunWriter, total: int) -> Iterator[None]:
    """Turn Ctrl-C into an error that says how much is done."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"{writer.folder}: interrupted; {writer.done} of {total} images are done. "
            "The same command goes on from there"
        ) from error


def _evaluate(
    session: Model,
    dataset: Dataset,
    protocol: Protocol,
    chunks: Sequence[Sequence[Sample]],
    writer: RunWriter,
    threads: int,
) -> None:
    """Evaluate chunks of samples and write each as it is done."""
    classes = len(session.contract.classes)
    with progress("validate", len(dataset.samples), "images", done=writer.done) as advance:
        begun = time.monotonic()
        for chunk, prepared in _prefetched(chunks, lambda sample: _prepare(dataset, sample, protocol), threads):
            classified = _classify_chunk(session, protocol, chunk, prepared)
            index = writer.done // writer.chunk
            writer.append(*_to_write(chunk, classified, classes))
            now = time.monotonic()
            writer.log("chunk", index=index, images=len(chunk), seconds=round(now - begun, 3))
            begun = now
            advance(len(chunk))


def _prefetched(
    chunks: Sequence[Sequence[Sample]], prepare: Callable[[Sample], Prepared], threads: int
) -> Iterator[tuple[Sequence[Sample], list[Prepared]]]:
    """Yield each chunk with its images prepared, while threads prepare the chunk after it."""
    pool = ThreadPoolExecutor(min(threads or os.cpu_count() or 1, MAX_THREADS), thread_name_prefix="decode")
    try:
        upcoming = [pool.submit(prepare, sample) for sample in chunks[0]]
        for number, chunk in enumerate(chunks, start=1):
            waiting = upcoming
            upcoming = [pool.submit(prepare, sample) for sample in (chunks[number] if number < len(chunks) else ())]
            prepared = [future.result() for future in waiting]
            del waiting  # the futures hold the pixels too
            yield chunk, prepared
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare(dataset: Dataset, sample: Sample, protocol: Protocol) -> Prepared:
    """Read, decode and resize one image; runs in a thread."""
    try:
        return make_views(decode_rgb(dataset.read(sample), apply_exif=protocol.apply_exif), protocol)
    except ImageError as error:
        return error


def _classify_chunk(
    session: Model, protocol: Protocol, chunk: Sequence[Sample], prepared: Sequence[Prepared]
) -> list[Classified | ImageError]:
    """Classify the images of a chunk; their views share batches."""
    views = [view for of_image in prepared if not isinstance(of_image, ImageError) for view in of_image]
    results = iter(run_views(session, views))
    classified: list[Classified | ImageError] = []
    for sample, of_image in zip(chunk, prepared, strict=True):
        if isinstance(of_image, ImageError):
            classified.append(of_image)
            continue
        try:
            classified.append(combine(protocol, list(islice(results, len(of_image)))))
        except ContractError as error:
            raise ContractError(f"{sample.file}: {error}") from error
    return classified


def _to_write(
    chunk: Sequence[Sample], classified: Sequence[Classified | ImageError], classes: int
) -> tuple[list[Prediction], npt.NDArray[np.float32]]:
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
