"""Photo sizes like ImageNet's: a fixed distribution, so that results are reproducible without the data.

This is an assumption, not a count: about half of the images are 500x375 or 375x500, a fifth have a longer side of 500
and another common shorter side, a tenth have other round sizes, and the rest have a longer side of 500 and any shorter
side from 281 to 499, or any size. It imitates the mix of shapes in ILSVRC's validation images, in which rare shapes
hardly repeat. Do not quote the shares of single sizes.
"""

from collections.abc import Sequence

import numpy as np

# (height, width): share of all images. Each landscape size is followed by its portrait size.
COMMON: dict[tuple[int, int], float] = {
    (375, 500): 0.39,
    (500, 375): 0.12,
    (333, 500): 0.08,
    (500, 333): 0.03,
    (334, 500): 0.03,
    (500, 334): 0.01,
    (332, 500): 0.02,
    (335, 500): 0.02,
    (400, 500): 0.01,
    (500, 400): 0.01,
    (500, 500): 0.02,
    (480, 640): 0.03,
    (640, 480): 0.01,
    (600, 800): 0.01,
    (768, 1024): 0.01,
    (1200, 1600): 0.01,
    (225, 300): 0.01,
    (300, 400): 0.01,
}
LONG_500 = 0.12  # longer side 500, any shorter side; two of three are landscape
# The rest, 0.05: both sides arbitrary, log-uniform.
SHORTEST_OF_500, SHORTEST, LONGEST = 281, 160, 1600  # pixels
LONGEST_RATIO = 3


def draw(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return `count` image sizes, (height, width) in pixels; equal seeds give equal sizes."""
    rng = np.random.default_rng(seed)
    common: Sequence[tuple[int, int]] = list(COMMON)
    shares = [*COMMON.values(), LONG_500, 1 - sum(COMMON.values()) - LONG_500]
    sizes = []
    for kind in rng.choice(len(shares), size=count, p=shares):
        if kind < len(common):
            sizes.append(common[kind])
            continue
        if kind == len(common):
            short, long = int(rng.integers(SHORTEST_OF_500, 500)), 500
        else:
            short = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
            long = min(LONGEST, int(short * rng.uniform(1, LONGEST_RATIO)))
        sizes.append((short, long) if rng.random() < 2 / 3 else (long, short))
    return sizes
