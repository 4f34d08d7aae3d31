"""Dropout as a pure function of (seed, step, row), so that a row loses the same units whichever process trains on it.

Source: PReLU-nets, section 4 "Training": 50 % on the first two fc layers.
"""

import numpy as np
import numpy.typing as npt

from prelunet.training.augmentation import DROPOUT, random_stream


def dropout_factors(
    seed: int, step: int, rows: range, width: int, rate: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return what the outputs of fc1 and of fc2 are multiplied by in a step, float32 (rows, width) each.

    rows: places in the step's global batch; rate: probability of 0, in [0, 1). The others are 1/(1−rate), so that the
    expectation stays and evaluation needs no factor. Drawn with 16 bits: the probability is exact to 2⁻¹⁷.
    """
    # One stream for a step, drawn from row 0 on: a stream for each row would cost more than its numbers.
    size = (rows.stop, 2 * width)
    drawn = random_stream(seed, DROPOUT, step).integers(2**16, size=size, dtype=np.uint16)[rows.start :]
    factors = (drawn >= round(rate * 2**16)) * np.float32(1 / (1 - rate))
    return factors[:, :width], factors[:, width:]
