"""What a result gives away about the labels it was counted with."""

_FEWEST_CLASSES = 100  # with fewer, a net that guesses is not that wrong
_SUSPICIOUS = 99.0  # percent top-1; devkit ids for class indices give about 99.9 with 1000 classes


def label_order_suspicion(top1_error: float | None, classes: int) -> str | None:
    """Return a sentence for people when an error looks as if the labels were in another order than the classes.

    top1_error: percent, None where no image was evaluated; classes: of the model. None when nothing is suspicious.
    The usual cause is ILSVRC's devkit ids (1 is n02119789, kit fox) taken for class indices, which follow the sorted
    wnids (0 is n01440764, tench).
    """
    if top1_error is None or classes < _FEWEST_CLASSES or top1_error < _SUSPICIOUS:
        return None
    return (
        f"a top-1 error of {top1_error:.2f} % over {classes:,} classes is hardly better than guessing: the labels may "
        "be in another order than the model's classes (the devkit's ids against sorted wnids). Check: look at a few "
        "images of one class; if their answers agree with each other and are right to the eye, the labels are wrong. "
        "Labels as wnids, or the devkit itself with --labels DIR, leave no doubt"
    )
