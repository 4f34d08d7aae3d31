"""The learning rate over a run."""

from training.recipe import Recipe


def rate_at(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step, counted from 0: the recipe's rate, times rate_factor after each drop.

    The paper lowers it twice by ten when the error stops falling (PReLU-nets, section 4); here the places are fixed.
    """
    drops = sum(step >= part * recipe.steps for part in recipe.rate_drops)
    return recipe.rate * recipe.rate_factor**drops
