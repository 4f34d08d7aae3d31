"""What a user is told before a training begins."""

from collections.abc import Iterator

from prelunet.evaluator.datasets.layouts import SHARDS
from prelunet.training.group import Group, computes_bf16
from prelunet.training.parallel import Kind
from prelunet.training.recipe import Recipe
from prelunet.training.splits import Splits


def first_words(recipe: Recipe, splits: Splits, group: Group, parallel: Kind | None) -> Iterator[str]:
    """Yield on what the training runs, what `--crop` may have chosen, and what is seldom meant."""
    if group.size > 1:
        yield f"training on {group.device.type}, {recipe.precision}, {group.size} processes, {parallel or 'ddp'}"
    else:
        alone = "" if parallel is None else f"; one process, so --parallel {parallel} changes nothing"
        yield f"training on {group.device}, {recipe.precision}{alone}"
    low, high = recipe.scales
    yield f"crop {recipe.crop}, scales {low} to {high}, batch {recipe.batch}, rate {recipe.rate:.4g}"
    if recipe.precision == "bf16" and not computes_bf16(group.device):
        yield f"this {group.device.type} has no bfloat16: torch imitates it, which takes many times as long as fp32"
    if splits.train.layout.startswith(SHARDS) and all(wnid.isdecimal() for wnid in splits.train.classes):
        yield (
            f"the classes are called {splits.train.classes[0]} to {splits.train.classes[-1]}, as in the shards: "
            "validation images whose classes have other names (ImageNet's wnids) will not fit this net"
        )
