"""A labelled dataset that a client streams: classified as it comes, counted as `prelunet validate` counts."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.errors import DatasetError, ImageError, UsageError
from prelunet.evaluator.protocols import EvaluationProtocol
from prelunet.evaluator.reporting.report import Report, build_report
from prelunet.evaluator.serving.classifier import Classifier
from prelunet.evaluator.serving.observability import call_context
from prelunet.evaluator.serving.observability.call_context import Caller
from prelunet.evaluator.serving.options import ServerLimits
from prelunet.evaluator.validation.predictions import Prediction, Predictions, build_prediction
from prelunet.evaluator.validation.run import Run, build_run_info, describe_dataset

MAX_IN_FLIGHT = 32  # images of one evaluation that are held at a time; the client waits while so many are unanswered
PROGRESS_INTERVAL = 1.0  # seconds at least from one progress to the next


@dataclass(frozen=True)
class LabelledImage:
    """One image of a streamed dataset. file: its name there; data: encoded; label: class index."""

    file: str
    data: bytes
    label: int


@dataclass(frozen=True)
class EvaluationProgress:
    """How far an evaluation is.

    images: answered, refused ones included; top1_error: percent of the others, None where there is none; seconds: since
    the evaluation began.
    """

    images: int
    refused: int
    top1_error: float | None
    seconds: float


ProgressCallback = Callable[[EvaluationProgress], Awaitable[None]]


async def evaluate(
    classifier: Classifier,
    protocol: EvaluationProtocol,
    dataset_name: str,
    images: AsyncIterator[LabelledImage],
    on_progress: ProgressCallback | None = None,
    caller: Caller = Caller(),
    *,
    max_images: int = ServerLimits.max_evaluation_images,
) -> Report:
    """Classify every image and return the report, equal to that of `prelunet validate` on the same images.

    dataset_name: for the report; of a path the last part. tell: is told of the progress, at most once in
    `PROGRESS_INTERVAL` seconds and never twice at a time. An image that is none is counted as refused; while one waits
    before the model's door, the next is not read. most: images that there may be; until the report 0.3 kB are kept of
    each, beside its name, and 2 bytes for each view. Raises DatasetError when there is no image, or when two have the
    same name, and UsageError when there are too many.
    """
    answered = _CollectedAnswers(len(classifier.session.contract.classes), len(protocol.views))
    places = asyncio.Semaphore(MAX_IN_FLIGHT)
    progress = _ProgressReporter(on_progress)

    async def one(image: LabelledImage, inside: asyncio.Event) -> None:
        prediction = await _predict(classifier, protocol, image, caller, inside)
        answered.add(prediction, len(image.data))
        call_context.note_done()
        await progress.count(prediction)
        places.release()

    try:
        async with asyncio.TaskGroup() as group:
            while await places.acquire() and (image := await anext(images, None)) is not None:
                answered.expect(image.file, max_images)
                inside = asyncio.Event()
                group.create_task(one(image, inside))
                del image  # while the next is waited for
                await inside.wait()
    except ExceptionGroup as failures:  # the first failure has cancelled the rest
        raise failures.exceptions[0] from None
    if not answered.places:
        raise DatasetError("the stream had no image; send at least one `image` after `start`")
    return await asyncio.to_thread(_report, classifier, protocol, dataset_name, answered)


class _CollectedAnswers:
    """What is kept of the images of an evaluation, in the order of the answers.

    places: of the names; of one that has no answer yet None.
    """

    def __init__(self, classes: int, views: int) -> None:
        self.places: dict[str, int | None] = {}
        self._new = partial(Predictions, classes, views)
        self._predictions = self._new()
        self._sizes = array("Q")

    def expect(self, file: str, max_images: int) -> None:
        """Take the name of an image that was read."""
        if file in self.places:
            raise DatasetError(f"two images are named '{file}'; each needs its own name")
        if len(self.places) == max_images:
            raise UsageError(
                f"this server evaluates at most {max_images} images in one call, and '{file}' is one more. "
                "Evaluate parts of the dataset, or use `prelunet validate`"
            )
        self.places[file] = None

    def add(self, prediction: Prediction, size: int) -> None:
        """Keep the answer to an image of so many bytes."""
        self.places[prediction.file] = len(self._predictions)
        self._predictions.append(prediction)
        self._sizes.append(size)

    def in_order(self) -> tuple[list[Sample], Predictions]:
        """Return samples and predictions in the order of the file names, which is the order of every run."""
        samples, predictions = [], self._new()
        for file in sorted(self.places):
            place = self.places[file]
            assert place is not None, "all are answered by now"
            prediction = self._predictions[place]
            samples.append(Sample(file, prediction.label, self._sizes[place]))
            predictions.append(prediction)
        return samples, predictions


class _ProgressReporter:
    """Counts answers, and tells of them now and then."""

    def __init__(self, on_progress: ProgressCallback | None) -> None:
        self._on_progress = on_progress
        self._begun = self._last_report = time.monotonic()
        self._reporting = False
        self._images = self._refused = self._wrong = 0

    async def count(self, prediction: Prediction) -> None:
        """Count an answer, and tell of all if it is time; nothing is told while nobody reads what was told before."""
        self._images += 1
        self._refused += prediction.refused is not None
        self._wrong += prediction.rank > 1
        now = time.monotonic()
        if self._on_progress is None or self._reporting or now - self._last_report < PROGRESS_INTERVAL:
            return
        self._reporting, self._last_report = True, now
        evaluated = self._images - self._refused
        error = 100 * self._wrong / evaluated if evaluated else None
        await self._on_progress(EvaluationProgress(self._images, self._refused, error, now - self._begun))
        self._reporting = False


async def _predict(
    classifier: Classifier, protocol: EvaluationProtocol, image: LabelledImage, caller: Caller, inside: asyncio.Event
) -> Prediction:
    on_progress = partial(build_prediction, image.file, image.label)
    try:
        async with classifier.admit_or_wait(len(image.data), len(protocol.views), caller.client):
            inside.set()
            return await classifier.classify(image.data, protocol, on_progress, caller=caller)
    except ImageError as error:
        return Prediction(image.file, image.label, refused=str(error))


class _DiscardedImages:
    """The reader of a dataset whose images are gone once they are classified."""

    def read(self, file: str) -> bytes:
        raise AssertionError(f"{file}: a streamed image is not kept")


def _report(
    classifier: Classifier, protocol: EvaluationProtocol, dataset_name: str, answered: _CollectedAnswers
) -> Report:
    samples, predictions = answered.in_order()
    wnids = tuple(entry.wnid for entry in classifier.session.contract.classes)
    dataset = Dataset(Path(dataset_name), wnids, samples, _DiscardedImages(), layout="stream")
    info = build_run_info(classifier.session, classifier.file, describe_dataset(dataset), protocol)
    return build_report(Run(info, predictions))
