"""Evaluate a labeled dataset that a client streams, with the same results as `prelunet validate`."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from ..datasets.dataset import Dataset, Sample
from ..errors import DatasetError, ImageError, UsageError
from ..protocols import EvaluationProtocol
from ..reporting.report import Report, build_report
from ..validation.predictions import Prediction, build_prediction
from ..validation.run import Run, build_run_info, describe_dataset
from .concurrency import answer_all
from .observability.call_context import Call
from .options import ServerLimits
from .scheduling.model import ServedModel
from .scheduling.request import Answered

MAX_IN_FLIGHT = 32  # unanswered images of one evaluation; at this number no more are read, so the client has to wait
MAX_TEXT_BYTES = 2**26  # of an evaluation's names and refusals: 268 bytes for each of 250,000 images
PROGRESS_INTERVAL = 1.0  # minimum number of seconds between two progress reports


class LabelledImage(Struct, frozen=True):
    """One image of a streamed dataset. file: its name in the dataset; data: encoded; label: class index."""

    file: str
    data: bytes
    label: int


class Progress(Struct, frozen=True):
    """images: answered so far, refused ones included; top1_error: in percent, None before the first."""

    images: int
    refused: int
    top1_error: float | None
    seconds: float


ProgressCallback: TypeAlias = Callable[[Progress], Awaitable[None]]
# Classifies an image, and calls the function once it is admitted.
Classify: TypeAlias = Callable[[bytes, Callable[[], None]], Awaitable[Answered]]


async def evaluate(
    classify: Classify,
    served: ServedModel,
    protocol: EvaluationProtocol,
    dataset_name: str,
    images: AsyncIterator[LabelledImage],
    *,
    call: Call,
    on_progress: ProgressCallback | None = None,
    max_images: int = ServerLimits.max_evaluation_images,
) -> Report:
    """Classify every image and return the report, equal to that of `prelunet validate` on the same images.

    dataset_name: for the report, which uses the last part of a path; on_progress: called at most once every
    `PROGRESS_INTERVAL` seconds, never concurrently; max_images: maximum number of images. Memory until the report: per
    image about 1 kB, and 30 bytes per view; names and refusals, at most MAX_TEXT_BYTES in all.

    A file that is not an image counts as refused. While an image waits for admission, the next one is not read.
    Raises DatasetError if there is no image or if two have the same name, and UsageError if there are too many, or if
    their names are too long.
    """
    answers = _CollectedAnswers(on_progress)
    slots = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def predict(image: LabelledImage, on_admitted: Callable[[], None]) -> None:
        answers.expect(image.file, max_images)
        try:
            answer = await classify(image.data, on_admitted)
            prediction = build_prediction(image.file, image.label, answer.classified)
        except ImageError as error:
            prediction = Prediction(image.file, image.label, refused=str(error))
        except UsageError as error:  # its shape, with this protocol
            raise UsageError(f"{image.file}: {error}") from error
        on_admitted()
        answers.add(prediction, len(image.data))
        call.message_done()
        await answers.report_progress()
        slots.release()

    await answer_all(images, slots, predict)
    if not answers.files:
        raise DatasetError("the stream had no image; send at least one `image` after `start`")
    return await asyncio.to_thread(_report, served, protocol, dataset_name, answers)


class _CollectedAnswers:
    """The predictions of an evaluation, each with the image's size; reports the progress. files: all names so far."""

    def __init__(self, on_progress: ProgressCallback | None) -> None:
        self.files = set[str]()
        self._answers = list[tuple[Prediction, int]]()
        self._text_bytes = 0  # of names and refusals
        self._on_progress, self._reporting = on_progress, False
        self._begun = self._last_report = time.monotonic()
        self._refused = self._wrong = 0

    def expect(self, file: str, max_images: int) -> None:
        """Register the name of an image that has been read."""
        if file in self.files:
            raise DatasetError(f"two images are named '{file}'; each needs its own name")
        if len(self.files) == max_images:
            raise UsageError(
                f"this server evaluates at most {max_images} images in one call, and '{file}' is above the limit. "
                "Evaluate the dataset in parts, or use `prelunet validate`"
            )
        if self._text_bytes > MAX_TEXT_BYTES:
            raise UsageError(
                f"the names and refusals of this evaluation take more than {MAX_TEXT_BYTES} bytes. Use shorter names, "
                "evaluate the dataset in parts, or use `prelunet validate`"
            )
        self.files.add(file)
        self._text_bytes += len(file.encode())

    def add(self, prediction: Prediction, size: int) -> None:
        """Store the answer to an image. size: of the image, in bytes."""
        self._answers.append((prediction, size))
        self._text_bytes += len(prediction.refused or "")
        self._refused += prediction.refused is not None
        self._wrong += prediction.rank > 1

    async def report_progress(self) -> None:
        """Report the progress if it is due and the client has received the previous report."""
        now = time.monotonic()
        if self._on_progress is None or self._reporting or now - self._last_report < PROGRESS_INTERVAL:
            return
        self._reporting, self._last_report = True, now
        images = len(self._answers)
        evaluated = images - self._refused
        error = 100 * self._wrong / evaluated if evaluated else None
        await self._on_progress(Progress(images, self._refused, error, now - self._begun))
        self._reporting = False

    def in_order(self) -> tuple[list[Sample], list[Prediction]]:
        """Return samples and predictions in the order of the file names, the order of every run."""
        answers = sorted(self._answers, key=lambda answer: answer[0].file)
        samples = [Sample(prediction.file, prediction.label, size) for prediction, size in answers]
        return samples, [prediction for prediction, _ in answers]


class _DiscardedImages:
    """The reader of a dataset whose images are not kept after classification."""

    def read(self, file: str) -> bytes:
        raise AssertionError(f"{file}: a streamed image is not kept")


def _report(served: ServedModel, protocol: EvaluationProtocol, dataset_name: str, answers: _CollectedAnswers) -> Report:
    samples, predictions = answers.in_order()
    wnids = tuple(entry.wnid for entry in served.session.contract.classes)
    dataset = Dataset(Path(dataset_name), wnids, samples, _DiscardedImages(), layout="stream")
    info = build_run_info(served.session, served.file, describe_dataset(dataset), protocol)
    return build_report(Run(info, predictions))
