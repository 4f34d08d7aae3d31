"""Simulate `compare --until-decided`: how often is a verdict wrong, and after how many images does it come?

    python -m benchmarks.reporting.deciding [--orders 10000] [--output FILE] [--tiny]

50,000 images, of which a share is answered rightly by only one of two models, in random orders; looked at after each
portion, as the command does, at a margin of 0.5 points. The rule, written before the first run: in each setting at most
5 % of the verdicts are wrong; with a difference of 2 points the median needs at most 10 % of the images, without one at
most 80 %. Takes half an hour on two cores.

Exit codes: 0 the rule holds, 1 it does not.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

import numpy as np

from benchmarks.common.results import RESULTS, circumstances, described_run, markdown, write_result
from benchmarks.common.runner import command_line
from prelunet.evaluator.arrays import Int64Array
from prelunet.evaluator.reporting.sequence import EXCLUDED, capital
from prelunet.evaluator.validation.portions import PORTION

IMAGES, MARGIN = 50_000, 0.5  # margin: in points
DISCORDANT = (0.08, 0.14, 0.20)
DIFFERENCES = (0.0, 0.25, 1.0, 2.0)  # points
MOST_WRONG, MOST_AT_2, MOST_AT_0 = 0.05, 0.10, 0.80
FIRST = 10_000  # images that decide most orders with a difference; the others are computed to the end


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "deciding.json", limit=float("inf"))
    parser.add_argument("--orders", type=int, default=10_000, help="random orders of each setting")
    options = parser.parse_args(words)
    orders = 20 if options.tiny else options.orders
    settings = list(product(DISCORDANT, DIFFERENCES))
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(_simulated, settings, [orders] * len(settings)))
    facts = circumstances(__file__, options, ("prelunet", "numpy"), words)
    result: dict[str, Any] = {"run": facts, "settings": rows}
    result["holds"] = all(row["holds"] for row in rows)
    write_result(options.output, result, table(result))
    print(table(result))
    return 0 if result["holds"] else 1


def _simulated(setting: tuple[float, float], orders: int) -> dict[str, Any]:
    discordant, points = setting
    rng = np.random.default_rng(int(1000 * discordant + 100_000 * points))
    only_b = round(IMAGES * (discordant + points / 100) / 2)
    differences = np.repeat(np.array([1, -1, 0]), (only_b, round(IMAGES * discordant) - only_b, IMAGES))[:IMAGES]
    found = [_decided(rng.permutation(differences)) for _ in range(orders)]
    right = {"not before all images"} | ({"B is worse"} if points else set[str]())
    right |= {"within the margin"} if points <= MARGIN else set()
    verdicts = Counter(verdict for verdict, _ in found)
    wrong = sum(count for verdict, count in verdicts.items() if verdict not in right) / orders
    share = float(np.median([images for _, images in found])) / IMAGES
    most = {2.0: MOST_AT_2, 0.0: MOST_AT_0}.get(points, 1.0)
    return {
        "discordant": discordant, "difference": points, "orders": orders, "verdicts": dict(verdicts), "wrong": wrong,
        "images": share, "most": float(np.quantile([images for _, images in found], 0.95)) / IMAGES,
        "holds": wrong <= MOST_WRONG and share <= most,
    }  # fmt: skip


def _decided(differences: Int64Array) -> tuple[str, int]:
    """Return the first verdict on images in this order, as the command finds it, and the images it took."""
    for end in (FIRST, IMAGES):
        seen = differences[:end]
        looks = np.arange(PORTION, min(end + 1, IMAGES), PORTION) - 1  # after all images, `compare` decides
        worse, better, above, below = (
            capital(side * seen, IMAGES, mean)[looks] >= EXCLUDED
            for side, mean in ((1, 0.0), (-1, 0.0), (1, -MARGIN / 100), (-1, -MARGIN / 100))
        )
        if (decided := worse | better | (above & below)).any():
            first = int(decided.argmax())
            verdict = "B is better" if better[first] else "B is worse" if worse[first] else "within the margin"
            return verdict, int(looks[first]) + 1
    return "not before all images", IMAGES


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{100 * row['discordant']:g} %", row["difference"],
            ", ".join(f"{verdict} {100 * count / row['orders']:.1f} %" for verdict, count in row["verdicts"].items()),
            f"{100 * row['wrong']:.1f} %", f"{100 * row['images']:.0f} %", f"{100 * row['most']:.0f} %",
        ]
        for row in result["settings"]
    ]  # fmt: skip
    header = ("only one is right", "difference, points", "verdicts", "wrong", "images, median", "95th percentile")
    holds = "The rule holds." if result["holds"] else "The rule does NOT hold."
    return (
        f"# Stopping when sure\n\n{described_run(result['run'])}\n\n{result['settings'][0]['orders']:,} orders of "
        f"{IMAGES:,} images for each row, margin {MARGIN} points. {holds}\n\n{markdown(header, rows)}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
