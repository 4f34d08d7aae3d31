"""A labelled dataset that a client streams: classified as it comes, counted as `prelunet validate` counts."""

import asyncio
from collections.abc import AsyncIterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evaluator.datasets.sample import Dataset, Sample
from evaluator.errors import DatasetError, ImageError
from evaluator.protocols import Protocol
from evaluator.reporting.report import Report, build_report
from evaluator.serving.classifier import Classifier
from evaluator.validation.predictions import Prediction, prediction_of
from evaluator.validation.run import Run, describe_dataset, run_info

IN_FLIGHT = 32  # images of one evaluation that are held at a time; the client waits while so many are unanswered


@dataclass(frozen=True)
class LabelledImage:
    """One image of a streamed dataset. file: its name there; data: encoded; label: class index."""

    file: str
    data: bytes
    label: int


async def evaluate(
    classifier: Classifier, protocol: Protocol, dataset_name: str, images: AsyncIterable[LabelledImage]
) -> Report:
    """Classify every image and return the report, equal to that of `prelunet validate` on the same images.

    dataset_name: for the report; of a path the last part. An image that is none is counted as refused.
    Raises DatasetError when there is no image, or when two have the same name.
    """
    answered: dict[str, tuple[Sample, Prediction]] = {}
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(image: LabelledImage) -> None:
        try:
            prediction = await _predict(classifier, protocol, image)
            answered[image.file] = (Sample(image.file, image.label, len(image.data)), prediction)
        finally:
            slots.release()

    names: set[str] = set()
    try:
        async with asyncio.TaskGroup() as group:
            async for image in images:
                if image.file in names:
                    raise DatasetError(f"two images are named '{image.file}'; each needs its own name")
                names.add(image.file)
                await slots.acquire()
                group.create_task(one(image))
    except ExceptionGroup as failures:  # the first failure has cancelled the rest
        raise failures.exceptions[0] from None
    if not answered:
        raise DatasetError("the stream had no image; send at least one `image` after `start`")
    return await asyncio.to_thread(_report, classifier, protocol, dataset_name, answered)


async def _predict(classifier: Classifier, protocol: Protocol, image: LabelledImage) -> Prediction:
    try:
        return await classifier.classify(image.data, protocol, partial(prediction_of, image.file, image.label))
    except ImageError as error:
        return Prediction(image.file, image.label, refused=str(error))


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
