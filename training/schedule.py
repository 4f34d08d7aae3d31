"""The learning rate over a run."""

from collections.abc import Sequence

from prelunet.training.recipe import Recipe


def rate_at(recipe: Recipe, step: int, drops: int = 0) -> float:
    """Return the learning rate of a step, counted from 0.

    drops: how often the error has stalled until then (`stalls`), for the rate_policy `plateau`. The paper lowers the
    rate twice by ten "when the error plateaus" (PReLU-nets, section 4); with `at` the places are fixed.
    """
    if recipe.rate_policy == "at":
        drops = sum(step >= part * recipe.length for part in recipe.rate_drops)
    return recipe.rate * recipe.rate_factor ** min(drops, _most(recipe))


def _most(recipe: Recipe) -> int:
    return recipe.most_drops if recipe.rate_policy == "plateau" else len(recipe.rate_drops)


def stalls(errors: Sequence[float], patience: int) -> int:
    """Return how often the error on val/ has stalled, given its measurements in their order.

    It stalls when none of `patience` measurements in a row is below the lowest one before them; counting begins anew
    after that, from the next measurement on.
    """
    found, lowest, waited = 0, float("inf"), 0
    for error in errors:
        if error < lowest:
            lowest, waited = error, 0
        else:
            waited += 1
        if waited == patience:
            found, lowest, waited = found + 1, float("inf"), 0
    return found
