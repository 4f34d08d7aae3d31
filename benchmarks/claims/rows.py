"""The experiments as data: nets, grids, seeds and claims. RULES.md explains them; both are fixed before any run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.claims import fisher
from benchmarks.common.intervals import interval_of_mean
from prelunet.training.net.architecture_file import read_architecture
from prelunet.training.recipe import Recipe

NETS = Path(__file__).parent / "nets"
CROP, JITTER = 56, (64, 128)  # pixels
STEPS = {"photos14": 4000, "photos22": 3000, "photos30": 3000}
RATES = (0.005, 0.01, 0.02)  # the grid; its ends are extended by the same factor
RATE_FACTOR, RATE_LIMITS = 2, (0.000625, 0.16)
SEARCH_SEEDS, SEEDS = (100, 101), (0, 1, 2, 3, 4)
SCALES = (56, 64, 80, 96, 112, 128)  # among which the best for one crop, ten crops and one dense scale is chosen
MULTI_SCALE = "dense-64-96-120"  # 256, 384, 480 for a crop of 224, like the paper's; not chosen
GUESSING = 90.0  # percent: the error of always answering the same of ten classes

TWO_LAYERS = "two-layers"  # the net of fisher.py, which is no recipe
FISHER_SEEDS = tuple(range(12))

Verdict = Literal["holds", "not shown", "the opposite"]
Figure = tuple[str, str]  # an arm, and what is measured of its nets


@dataclass(frozen=True)
class Arm:
    """What is trained: a net of nets/ and its changes of the common recipe."""

    net: str
    changes: Mapping[str, Any]

    def recipe(self, rate: float, seed: int) -> Recipe:
        """Return the recipe of one training; the arms of a row differ in nothing else than their changes and rates."""
        steps = STEPS[self.net]
        common: dict[str, Any] = {
            "architecture": read_architecture(NETS / f"{self.net}.toml"),
            "crop": CROP,
            "scales": JITTER,
            "batch": 64,
            "steps": steps,
            "rate": rate,
            "rate_drops": (0.6, 0.85),
            "dropout": 0.2,
            "evaluate_every": steps,
            "save_every": min(500, steps),
            "seed": seed,
        }
        return Recipe(**{**common, **self.changes})


@dataclass(frozen=True)
class Claim:
    """A statement on the difference `ours` − `baseline`, paired by seed. baseline: None for 0.

    sign: of the difference if the statement is true; paper: what the paper has, in the same unit.
    """

    text: str
    ours: Figure
    baseline: Figure | None
    sign: Literal[-1, 1]
    paper: str = "–"


@dataclass(frozen=True)
class Row:
    """A command: the arms that it trains and the claims that it decides."""

    title: str
    arms: Sequence[str]
    claims: Sequence[Claim]
    seeds: Sequence[int] = SEEDS


def verdict(differences: Sequence[float], sign: Literal[-1, 1]) -> Verdict:
    """Apply the rule: the 95 % t interval of the mean difference excludes 0 in the claimed direction, or not."""
    low, high = interval_of_mean(differences)
    if low <= 0 <= high:
        return "not shown"
    return "holds" if (low > 0) == (sign > 0) else "the opposite"


ARMS: dict[str, Arm] = {
    "relu": Arm("photos14", {"activation": "relu"}),
    "lrelu": Arm("photos14", {"activation": "lrelu"}),
    "prelu-shared": Arm("photos14", {"activation": "prelu-shared"}),
    "prelu": Arm("photos14", {"activation": "prelu"}),
    "prelu-decayed": Arm("photos14", {"activation": "prelu", "decay_slopes": True}),
    **{
        f"{name}-{layers}": Arm(f"photos{layers}", {"activation": "relu", "init": rule})
        for layers in (22, 30)
        for name, rule in (("eq14", "fan-out"), ("eq10", "fan-in"), ("xavier", "xavier-all"), ("mixture", "xavier"))
    },
    "two-layers-relu": Arm(TWO_LAYERS, {"activation": "relu"}),
    "two-layers-prelu": Arm(TWO_LAYERS, {"activation": "prelu"}),
}

# Arms that are not trained: combined from those that are (run.py).
MEMBERS = ("prelu", "prelu-shared", "prelu-decayed")
ENSEMBLE, BEST_MEMBER = "ensemble", "best member"
BEST = "best "  # prefix of a kind of protocol: at the scale that is best on the held-out part

ROWS: dict[str, Row] = {
    "fisher": Row(
        "PReLU, mean responses and the Fisher matrix",
        ("two-layers-relu", "two-layers-prelu"),
        [
            Claim(f"PReLU, smaller {figure}", ("two-layers-prelu", figure), ("two-layers-relu", figure), -1)
            for stage in fisher.STAGES
            for figure in (f"{statistic}, {stage}" for statistic in fisher.STATISTICS)
        ],
        FISHER_SEEDS,
    ),
    "activations": Row(
        "Activations (Tables 2 and 4)",
        ("relu", "lrelu", "prelu-shared", "prelu"),
        [
            Claim("PReLU per channel beats ReLU, ten crops", ("prelu", "ten-crop"), ("relu", "ten-crop"), -1, "−1.18"),
            Claim("PReLU per layer beats ReLU, ten crops",
                  ("prelu-shared", "ten-crop"), ("relu", "ten-crop"), -1, "−1.11"),
            Claim("PReLU per channel beats leaky ReLU, ten crops", ("prelu", "ten-crop"), ("lrelu", "ten-crop"), -1),
            Claim("PReLU per channel beats ReLU, multi-scale",
                  ("prelu", MULTI_SCALE), ("relu", MULTI_SCALE), -1, "−1.05"),
        ],
    ),
    "slopes": Row(
        "Slopes by depth (Table 1)",
        ("prelu",),
        [
            Claim("The slopes of conv1 are larger than those above",
                  ("prelu", "slope of conv1"), ("prelu", "slope above conv1"), 1, "+0.40"),
            Claim("Slopes fall with depth: the rank correlation is negative",
                  ("prelu", "rank correlation of slopes with depth"), None, -1, "−0.87"),
        ],
    ),
    "decay": Row(
        "Weight decay on slopes (section 2.1)",
        ("prelu", "prelu-decayed"),
        [
            Claim("Decay brings slopes nearer to 0",
                  ("prelu-decayed", "mean size of slopes"), ("prelu", "mean size of slopes"), -1),
            Claim("Slopes without decay have the lower error, ten crops",
                  ("prelu", "ten-crop"), ("prelu-decayed", "ten-crop"), -1),
        ],
    ),
    **{
        f"init{layers}": Row(
            f"Initialization of {layers} layers (Figure {figure})",
            tuple(f"{name}-{layers}" for name in ("eq14", "eq10", "xavier", "mixture")),
            [
                *(
                    Claim(text, (f"{ours}-{layers}", figure), (f"{baseline}-{layers}", figure), -1)
                    for ours, baseline, name in (
                        ("eq14", "xavier", "Eq. 14 {} than Xavier"),
                        ("eq10", "xavier", "Eq. 10 {} than Xavier"),
                        ("eq14", "mixture", "Eq. 14 {} than the mixture"),
                        ("xavier", "mixture", "Xavier {} than the mixture"),
                    )
                    for figure, what in (("early loss", "learns earlier"), ("center", "ends with a lower error"))
                    for text in (name.format(what),)
                ),
            ],
        )
        for layers, figure in ((22, 2), (30, 3))
    },
    "protocols": Row(
        "Test protocols (Tables 4 to 6; SPP-net)",
        ("prelu",),
        [
            Claim("Ten crops beat the best single crop", ("prelu", "best ten-crop"), ("prelu", "best center"), -1),
            Claim("Dense at one scale beats the best single crop",
                  ("prelu", "best dense"), ("prelu", "best center"), -1),
            Claim("Multi-scale beats the best dense scale",
                  ("prelu", MULTI_SCALE), ("prelu", "best dense"), -1, "−1.23"),
            Claim("Multi-scale beats ten crops", ("prelu", MULTI_SCALE), ("prelu", "best ten-crop"), -1, "−2.62"),
            Claim("SPP-18 beats ten crops", ("prelu", "spp-18"), ("prelu", "best ten-crop"), -1),
        ],
    ),
    "ensemble": Row(
        "Ensembles of three (Table 7)",
        MEMBERS,
        [
            Claim("Three nets beat the best single one, multi-scale",
                  (ENSEMBLE, MULTI_SCALE), (BEST_MEMBER, MULTI_SCALE), -1),
        ],
    ),
}  # fmt: skip
