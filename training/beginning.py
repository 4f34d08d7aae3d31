"""What a run begins with: what is known of its images, and its first weights."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from prelunet.evaluator.datasets.sample import Dataset
from prelunet.training.checkpoints import FloatArray
from prelunet.training.initialization import initial_tensors
from prelunet.training.recipe import Recipe
from prelunet.training.splits import Splits
from prelunet.training.start import start_from
from prelunet.training.state import Progress
from prelunet.training.stats import Survey, still_holds, survey


def beginning(
    recipe: Recipe, splits: Splits, start: Path | None, cache: Path | None, announce: Callable[[str], None]
) -> tuple[Mapping[str, FloatArray], Progress]:
    """Look at all images once, and draw the initial weights or take those to begin with.

    start: a checkpoint whose weights and mean are the first ones; cache: see `training.stats.survey`; announce: told
    what a user should know. Raises DatasetError where too many images cannot be decoded, and as `start_from`.
    """
    look = partial(survey, scale=recipe.evaluation_scale, crop=recipe.crop, cache=cache, announce=announce)

    def surveyed(dataset: Dataset, what: str) -> Survey:
        found = look(dataset, what)
        if still_holds(found, dataset):
            return found
        announce(f"{what}: images have changed since they were looked at, so all are looked at anew")
        return look(dataset, what, fresh=True)

    of_train, of_val = surveyed(splits.train, "train/"), surveyed(splits.val, "val/")
    mean = of_train.mean_image if recipe.mean == "image" else of_train.mean_channels
    net, how = recipe.net(), recipe.initialization()
    if start is None:
        tensors = initial_tensors(net, len(splits.classes), recipe.seed, how)
    else:
        begun = start_from(start, net, splits.classes, recipe.seed, how, mean.shape)
        tensors, mean = begun.tensors, begun.mean
        for remark in begun.remarks:
            announce(remark)
    return tensors, Progress(mean, of_train.axes, {"train": of_train.refused, "val": of_val.refused})
