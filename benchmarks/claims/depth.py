"""Does a net of 30 layers learn? The paper's initialization compared with Xavier's, on real pictures.

    python -m benchmarks.claims.depth --runs RUNS --output benchmarks/results/thirty-layers.json \\
        --plot docs/images/thirty-layers.svg

The claim (PReLU-nets, section 2.2 and Fig. 3): a net of 27 convolutions and 3 fully connected layers converges if its
convolutions are initialized by Eq. 14, and stalls with Xavier's rule, because responses then halve at every ReLU.

Net: `demo30`, the paper's 30-layer net in miniature (its 1 + 4 + 22 convolutions, most of them 2x2), on the embedded
part of Fashion-MNIST. Only the rule of the convolutions differs: fc1, fc2, fc3 start with the paper's deviations 0.01,
0.01, 0.001, and the rate is constant. A seed determines weights, order, views and dropout; the weights of Eq. 14 are
Gaussian and Xavier's uniform, as in the paper. The paper's figure is for ReLU; PReLU is measured too.
A stall here comes from the rule and these deviations together: with Xavier's deviations in the fc layers too (0.0386,
0.0625, 0.0625) every ReLU net learned, in a trial whose result file is not committed yet.
A rate can be too low for one rule and too high for the other, so the ReLU nets are trained at two rates: the lower one
was chosen for Eq. 14, and the higher one, the paper's 0.01, is near or beyond the limit of Eq. 14 here.

The criterion is the loss over the last tenth of the run, relative to ln 10, the loss of predicting 10 % for every
class. A net has *stalled* within 1 % of it, and has *learned* below. It has *diverged* if a number became non-finite;
its error then counts as that of guessing. Intervals: Student's t over seeds, 95 %. Trainings are kept in RUNS: the same
command resumes an interrupted one.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.intervals import interval_of_mean
from benchmarks.common.results import circumstances, markdown, write_result
from benchmarks.common.runner import command_line, several
from prelunet.evaluator.architectures import Activation
from prelunet.evaluator.errors import DivergenceError
from prelunet.evaluator.files import write_atomically
from prelunet.evaluator.reporting.charts import chart_spec
from prelunet.evaluator.reporting.html import draw_svg
from prelunet.training.loop.execution import Execution
from prelunet.training.loop.train import train
from prelunet.training.net.initialization import Rule
from prelunet.training.recipe import Recipe
from prelunet.training.run_state.run_folder import METRICS_FILE

RATE, HIGHER_RATE = 0.005, 0.01
CLASSES, GUESSING = 10, 90.0  # percent: the error of always predicting the same class
STALLED = 0.01  # relative distance to the loss of guessing
OUTCOMES = ("learned", "stalled", "diverged")
TITLES = {"relu": "ReLU", "prelu": "PReLU", "fan-out": "Eq. 14", "xavier": "Xavier"}


@dataclass(frozen=True)
class Arm:
    """One initialization, trained with several seeds."""

    activation: Activation
    init: Rule
    rate: float = RATE

    @property
    def title(self) -> str:
        """Return its name in tables and plots."""
        faster = "" if self.rate == RATE else f", rate {self.rate:g}"
        return f"{TITLES[self.activation]}, {TITLES[self.init]}{faster}"

    def recipe(self, steps: int, seed: int) -> Recipe:
        """Return the recipe of a training, evaluated 12 times."""
        return Recipe(
            architecture="demo30",
            activation=self.activation,
            init=self.init,
            crop=28,
            scales=(28, 36),
            batch=32,
            steps=steps,
            rate=self.rate,
            dropout=0.2,
            evaluate_every=max(1, steps // 12),
            save_every=steps,
            seed=seed,
        )


ARMS = (
    Arm("relu", "fan-out"),
    Arm("relu", "xavier"),
    Arm("prelu", "fan-out"),
    Arm("prelu", "xavier"),
    Arm("relu", "fan-out", HIGHER_RATE),
    Arm("relu", "xavier", HIGHER_RATE),
)


def main() -> None:
    """Train all nets, print the table, write the result and the plot."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="folder for the trainings; interrupted ones resume")
    parser.add_argument("--seeds", type=several, default=3, help="number of nets per arm, at least 2")
    parser.add_argument("--steps", type=int, default=1500, help="steps of each training")
    parser.add_argument("--plot", type=Path, help="SVG file to draw")
    options = parser.parse_args()
    nets = [
        trained(arm, options.steps, seed, options.runs)
        for seed in range(options.seeds)  # outer loop over seeds: an interrupted run covers every arm
        for arm in ARMS
    ]
    summary = [summarize(arm, [net for net in nets if net["title"] == arm.title]) for arm in ARMS]
    table = markdown(("net and rule", "error on val/ after training (95 %)", *OUTCOMES), map(_cells, summary))
    print(table)
    recipe = ARMS[0].recipe(options.steps, 0).to_json()
    result = {
        **circumstances(__file__, options, ("prelunet", "torch", "numpy", "scipy", "pillow")),
        "recipe": {key: value for key, value in recipe.items() if key not in {"activation", "init", "rate", "seed"}},
        "summary": summary,
        "nets": nets,
    }
    write_result(options.output, result, f"{table}\n")
    if options.plot is not None:
        write_atomically(options.plot, draw(nets))


def trained(arm: Arm, steps: int, seed: int, runs: Path) -> dict[str, Any]:
    """Train one net, or reuse it from an earlier call, and return its curves."""
    folder = runs / f"{arm.activation}-{arm.init}-{arm.rate:g}-{seed}"
    begun = time.monotonic()
    try:
        train(arm.recipe(steps, seed), None, folder, execution=Execution(device="cpu", cache=runs / "cache"))
        diverged = False
    except DivergenceError as error:
        print(error, file=sys.stderr)
        diverged = True
    log = folder / METRICS_FILE  # missing if the training diverged before its first line
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    errors = [[line["step"], line["top1_error"]] for line in lines if "top1_error" in line]
    losses = [[line["step"], round(line["loss"], 4)] for line in lines if "loss" in line]
    if diverged:  # whatever its last error was, it only guesses now
        errors.append([losses[-1][0] if losses else 0, GUESSING])
    last = [loss for step, loss in losses if step > 0.9 * steps]
    part = math.nan if diverged else float(np.mean(last)) / math.log(CLASSES)
    print(f"{arm.title}, seed {seed}: error {errors[-1][1]:.2f} %, {time.monotonic() - begun:.0f} s", flush=True)
    return {
        "title": arm.title,
        "activation": arm.activation,
        "init": arm.init,
        "rate": arm.rate,
        "seed": seed,
        "learned": part < 1 - STALLED,
        "stalled": abs(part - 1) <= STALLED,
        "diverged": diverged,
        "errors": errors,
        "losses": losses,
    }


def summarize(arm: Arm, nets: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of the last errors of an arm with its interval, and how many nets learned and stalled."""
    last = np.array([net["errors"][-1][1] for net in nets])
    low, high = interval_of_mean(last)
    return {
        "title": arm.title,
        "top1_error": round(float(last.mean()), 2),
        "interval": [round(max(0.0, low), 2), round(min(100.0, high), 2)],
        "nets": len(nets),
        "learned": sum(net["learned"] for net in nets),
        "stalled": sum(net["stalled"] for net in nets),
        "diverged": sum(net["diverged"] for net in nets),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row["interval"]
    error = f"{row['top1_error']:.1f} % ({low:.1f} to {high:.1f})"
    return [row["title"], error, *(f"{row[key]} of {row['nets']}" for key in OUTCOMES)]


def draw(nets: list[dict[str, Any]]) -> bytes:
    """Return the SVG: the error on val/ over the steps, a line for each net, like Fig. 3 of the paper."""
    rows = [
        {
            "net": f"{net['title']} {net['seed']}",
            "rule": TITLES[net["init"]],
            "kind": kind,
            "step": step,
            "error": error,
        }
        for net in nets
        for kind in [net["title"].replace(f", {TITLES[net['init']]}", "")]
        for step, error in net["errors"]
    ]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    rule = {"domain": [TITLES["fan-out"], TITLES["xavier"]], "range": ["var(--accent)", "#c2571a"]}
    legend = {"symbolType": "stroke", "symbolStrokeWidth": 2, "symbolSize": 300}
    dash = {"domain": kinds, "range": [[1, 0], [6, 3], [2, 3]][: len(kinds)]}
    spec = chart_spec(
        rows,
        height=260,
        mark={"type": "line", "strokeWidth": 1.75, "opacity": 0.85},
        encoding={
            "x": {"field": "step", "type": "quantitative", "title": "steps (batches of 32)", "axis": {"grid": False}},
            "y": {"field": "error", "type": "quantitative", "title": "error on val/ (percent)",
                  "scale": {"domain": [0, 100]}, "axis": {"domain": False}},
            "detail": {"field": "net"},
            "color": {"field": "rule", "type": "nominal", "title": None, "scale": rule, "legend": legend},
            "strokeDash": {"field": "kind", "type": "nominal", "title": None, "scale": dash, "legend": legend},
        },
    )  # fmt: skip
    return draw_svg({**spec, "width": 560, "autosize": "pad", "padding": 12})


if __name__ == "__main__":
    main()
