"""A labelled dataset that a client streams: classified as it comes, counted as `prelunet validate` counts."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evaluator.datasets.sample import Dataset, Sample
from evaluator.errors import DatasetError, ImageError, Overloaded
from evaluator.protocols import Protocol
from evaluator.reporting.report import Report, build_report
from evaluator.serving.caller import Caller
from evaluator.serving.classifier import Classifier
from evaluator.validation.predictions import Prediction, prediction_of
from evaluator.validation.run import Run, describe_dataset, run_info

IN_FLIGHT = 32  # images of one evaluation that are held at a time; the client waits while so many are unanswered
PROGRESS = 1.0  # seconds at least from one progress to the next
_AT_THE_DOOR = 1.0  # seconds at most until an image that was not let in tries again


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
) -> Report:
    """Classify every image and return the report, equal to that of `prelunet validate` on the same images.

    dataset_name: for the report; of a path the last part. tell: is told of the progress, at most once in `PROGRESS`
    seconds and never twice at a time. An image that is none is counted as refused.
    Raises DatasetError when there is no image, or when two have the same name.
    """
    answered: dict[str, tuple[Sample, Prediction]] = {}
    places = asyncio.Semaphore(IN_FLIGHT)
    progress = _ProgressSoFar(tell)

    async def one(image: LabelledImage) -> None:
        prediction = await _predict(classifier, protocol, image, caller)
        answered[image.file] = (Sample(image.file, image.label, len(image.data)), prediction)
        await progress.count(prediction)
        places.release()

    names: set[str] = set()
    try:
        async with asyncio.TaskGroup() as group:
            while await places.acquire() and (image := await anext(images, None)) is not None:
                if image.file in names:
                    raise DatasetError(f"two images are named '{image.file}'; each needs its own name")
                names.add(image.file)
                group.create_task(one(image))
    except ExceptionGroup as failures:  # the first failure has cancelled the rest
        raise failures.exceptions[0] from None
    if not answered:
        raise DatasetError("the stream had no image; send at least one `image` after `start`")
    return await asyncio.to_thread(_report, classifier, protocol, dataset_name, answered)


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


async def _predict(classifier: Classifier, protocol: Protocol, image: LabelledImage, caller: Caller) -> Prediction:
    tell = partial(prediction_of, image.file, image.label)
    try:
        async with _admitted(classifier, len(image.data), len(protocol.views)):
            return await classifier.classify(image.data, protocol, tell, caller=caller)
    except ImageError as error:
        return Prediction(image.file, image.label, refused=str(error))


@asynccontextmanager
async def _admitted(classifier: Classifier, size: int, views: int) -> AsyncIterator[None]:
    """Wait until the image is let in, where a call of its own would be refused: its client waits on the stream."""
    with ExitStack() as inside:
        while True:
            try:
                inside.enter_context(classifier.admitted(size, views))
                break
            except Overloaded as full:
                await asyncio.sleep(min(full.retry_after or _AT_THE_DOOR, _AT_THE_DOOR))
        yield


class _NotKept:
    """The reader of a dataset whose images are gone once they are classified."""

    def read(self, file: str) -> bytes:
        raise AssertionError(f"{file}: a streamed image is not kept")


def _report(
    classifier: Classifier, protocol: Protocol, dataset_name: str, answered: dict[str, tuple[Sample, Prediction]]
) -> Report:
    """Report on the predictions in the order of the file names, which is the order of every run."""
    in_order = [answered[file] for file in sorted(answered)]
    wnids = tuple(entry.wnid for entry in classifier.session.contract.classes)
    dataset = Dataset(Path(dataset_name), wnids, [sample for sample, _ in in_order], _NotKept(), layout="stream")
    info = run_info(classifier.session, classifier.file, describe_dataset(dataset), protocol)
    return build_report(Run(info, [prediction for _, prediction in in_order]))
