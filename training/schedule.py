"""The learning-rate schedule: fixed drops, or a drop whenever the error on val/ stops falling."""

from collections.abc import Sequence

from prelunet.training.recipe import Recipe


def rate_at(recipe: Recipe, step: int, drops: int = 0) -> float:
    """Return the learning rate of a step, counted from 0.

    drops: number of plateaus so far (`count_plateaus`), used by the rate_policy `plateau` only. The paper divides the
    rate by ten twice, "when the error plateaus" (PReLU-nets, section 4). The policy `at` drops it at fixed steps.
    """
    if recipe.rate_policy == "at":
        drops = sum(step >= part * recipe.total_steps for part in recipe.rate_drops)
    else:
        drops = min(drops, recipe.most_drops)
    return recipe.rate * recipe.rate_factor**drops


def count_plateaus(errors: Sequence[float], patience: int) -> int:
    """Count the plateaus of the error on val/, given all evaluations in order.

    A plateau is `patience` consecutive evaluations none of which is below the lowest one before them. After a plateau,
    counting restarts with the next evaluation.
    """
    plateaus, lowest, waited = 0, float("inf"), 0
    for error in errors:
        if error < lowest:
            lowest, waited = error, 0
        else:
            waited += 1
        if waited == patience:
            plateaus, lowest, waited = plateaus + 1, float("inf"), 0
    return plateaus
