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
from prelunet.evaluator.protocols import Protocol
from prelunet.evaluator.reporting.report import Report, build_report
from prelunet.evaluator.serving.classifier import Classifier
from prelunet.evaluator.serving.observability import call_context
from prelunet.evaluator.serving.observability.call_context import Caller
from prelunet.evaluator.serving.options import Limits
from prelunet.evaluator.validation.predictions import Prediction, Predictions, prediction_of
from prelunet.evaluator.validation.run import Run, describe_dataset, run_info

IN_FLIGHT = 32  # images of one evaluation that are held at a time; the client waits while so many are unanswered
PROGRESS = 1.0  # seconds at least from one progress to the next


@dataclass(frozen=True)
class LabelledImage:
    """One image of a streamed dataset. file: its name there; data: encoded; label: class index."""

    file: str
    data: bytes
    label: int


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is.

    images: answered, refused ones included; top1_error: percent of the others, None where there is none; seconds: since
    the evaluation began.
    """

    images: int
    refused: int
    top1_error: float | None
    seconds: float


Tell = Callable[[Progress], Awaitable[None]]


async def evaluate(
    classifier: Classifier,
    protocol: Protocol,
    dataset_name: str,
    images: AsyncIterator[LabelledImage],
    tell: Tell | None = None,
    caller: Caller = Caller(),
    *,
    most: int = Limits.max_evaluation_images,
) -> Report:
    """Classify every image and return the report, equal to that of `prelunet validate` on the same images.

    dataset_name: for the report; of a path the last part. tell: is told of the progress, at most once in `PROGRESS`
    seconds and never twice at a time. An image that is none is counted as refused; while one waits before the model's
    door, the next is not read. most: images that there may be; until the report 0.3 kB are kept of each, beside its
    name, and 2 bytes for each view.
    Raises DatasetError when there is no image, or when two have the same name, and UsageError when there are too many.
    """
    answered = _Answered(len(classifier.session.contract.classes), len(protocol.views))
    places = asyncio.Semaphore(IN_FLIGHT)
    progress = _ProgressSoFar(tell)

    async def one(image: LabelledImage, inside: asyncio.Event) -> None:
        prediction = await _predict(classifier, protocol, image, caller, inside)
        answered.add(prediction, len(image.data))
        call_context.note_done()
        await progress.count(prediction)
        places.release()

    try:
        async with asyncio.TaskGroup() as group:
            while await places.acquire() and (image := await anext(images, None)) is not None:
                answered.expect(image.file, most)
                inside = asyncio.Event()
                group.create_task(one(image, inside))
                del image  # while the next is waited for
                await inside.wait()
    except ExceptionGroup as failures:  # the first failure has cancelled the rest
        raise failures.exceptions[0] from None
    if not answered.places:
        raise DatasetError("the stream had no image; send at least one `image` after `start`")
    return await asyncio.to_thread(_report, classifier, protocol, dataset_name, answered)


class _Answered:
    """What is kept of the images of an evaluation, in the order of the answers.

    places: of the names; of one that has no answer yet None.
    """

    def __init__(self, classes: int, views: int) -> None:
        self.places: dict[str, int | None] = {}
        self._new = partial(Predictions, classes, views)
        self._predictions = self._new()
        self._sizes = array("Q")

    def expect(self, file: str, most: int) -> None:
        """Take the name of an image that was read."""
        if file in self.places:
            raise DatasetError(f"two images are named '{file}'; each needs its own name")
        if len(self.places) == most:
            raise UsageError(
                f"this server evaluates at most {most} images in one call, and '{file}' is one more. "
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


class _ProgressSoFar:
    """Counts answers, and tells of them now and then."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        self._begun = self._told = time.monotonic()
        self._telling = False
        self._images = self._refused = self._wrong = 0

    async def count(self, prediction: Prediction) -> None:
        """Count an answer, and tell of all if it is time; nothing is told while nobody reads what was told before."""
        self._images += 1
        self._refused += prediction.refused is not None
        self._wrong += prediction.rank > 1
        now = time.monotonic()
        if self._tell is None or self._telling or now - self._told < PROGRESS:
            return
        self._telling, self._told = True, now
        evaluated = self._images - self._refused
        error = 100 * self._wrong / evaluated if evaluated else None
        await self._tell(Progress(self._images, self._refused, error, now - self._begun))
        self._telling = False


async def _predict(
    classifier: Classifier, protocol: Protocol, image: LabelledImage, caller: Caller, inside: asyncio.Event
) -> Prediction:
    tell = partial(prediction_of, image.file, image.label)
    try:
        async with classifier.entered(len(image.data), len(protocol.views), caller.client):
            inside.set()
            return await classifier.classify(image.data, protocol, tell, caller=caller)
    except ImageError as error:
        return Prediction(image.file, image.label, refused=str(error))


class _NotKept:
    """The reader of a dataset whose images are gone once they are classified."""

    def read(self, file: str) -> bytes:
        raise AssertionError(f"{file}: a streamed image is not kept")


def _report(classifier: Classifier, protocol: Protocol, dataset_name: str, answered: _Answered) -> Report:
    samples, predictions = answered.in_order()
    wnids = tuple(entry.wnid for entry in classifier.session.contract.classes)
    dataset = Dataset(Path(dataset_name), wnids, samples, _NotKept(), layout="stream")
    info = run_info(classifier.session, classifier.file, describe_dataset(dataset), protocol)
    return build_report(Run(info, predictions))
