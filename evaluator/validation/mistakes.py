"""Which misclassified images a report shows, and in which order. It depends only on the predictions."""

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

from .predictions import Prediction

GALLERY_SIZE = 48  # images in the gallery
MAX_PER_CLASS = 3  # so that one bad class does not fill the gallery


def mistakes_as_shown(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return all mistakes in the order in which a report shows them: those of the gallery, then the rest in turns."""
    return list(dict.fromkeys([*choose_mistakes(predictions), *mistakes_round_robin(predictions)]))


def choose_mistakes(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the mistakes of the gallery, most confident first, at most 3 per class and 48 in total."""
    of_class: Counter[int] = Counter()
    chosen: list[Prediction] = []
    for prediction in _most_confident_mistakes(predictions):
        if of_class[prediction.label] < MAX_PER_CLASS:
            of_class[prediction.label] += 1
            chosen.append(prediction)
        if len(chosen) == GALLERY_SIZE:
            break
    return chosen


def mistakes_round_robin(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return all mistakes: the most confident of each class, then the second of each class, and so on."""
    turn: Counter[int] = Counter()
    placed = []
    for prediction in _most_confident_mistakes(predictions):
        placed.append((turn[prediction.label], prediction))
        turn[prediction.label] += 1
    return [prediction for _, prediction in sorted(placed, key=itemgetter(0))]  # stable: keeps the order of confidence


def _most_confident_mistakes(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the mistakes by descending score; ties by name, in which order a run is sorted."""
    return sorted((p for p in predictions if p.rank > 1), key=lambda p: -p.top[0][1])
