"""Which activation is best? PReLU per channel, PReLU shared by a layer, ReLU, leaky ReLU (PReLU-nets, Table 2).

    python tools/build_fashion_mnist.py /usr/share/datasets/fashion-mnist --all -o FASHION.zip
    python -m benchmarks.claims.activations --data FASHION.zip --runs DIR --output benchmarks/results/activations.json

The demo net is trained on all of Fashion-MNIST with each activation and several seeds. Steps, rates and dropout are the
same. Equal seeds also give the same order of images, the same views and, except for the factor 1/(1 + a²) of Eq. 15,
the same initial weights. Errors are those of the central crop on the 10,000 test images at the end of each training.

Differences are B - A in percentage points, paired by seed: the mean and the 95 % interval of Student's t over the
seeds, which describes the variation of trainings, not of test images. Interrupted trainings resume in DIR; finished
ones are not repeated.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.common.intervals import interval_of_mean
from benchmarks.common.results import circumstances, markdown, write_result
from benchmarks.common.runner import command_line, several
from prelunet.evaluator.architectures import Activation
from prelunet.training.loop.execution import Execution
from prelunet.training.loop.train import train
from prelunet.training.recipe import read_recipe

ORDER: tuple[Activation, ...] = ("relu", "lrelu", "prelu-shared", "prelu")
PAIRS: tuple[tuple[Activation, Activation], ...] = (
    ("relu", "lrelu"), ("relu", "prelu-shared"), ("relu", "prelu"), ("prelu-shared", "prelu"),
)  # fmt: skip
PAPER = {  # Table 2: top-1 on ImageNet, ten views, model E; it has no number for leaky ReLU
    ("relu", "prelu-shared"): 32.71 - 33.82,
    ("relu", "prelu"): 32.64 - 33.82,
    ("prelu-shared", "prelu"): 32.64 - 32.71,
}
assert set(ORDER) == set(get_args(Activation))


def main() -> None:
    """Train, compare and write the result."""
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="all of Fashion-MNIST, built as above")
    parser.add_argument("--runs", type=Path, required=True, help="folder for the trainings")
    parser.add_argument("--seeds", type=several, default=3, help="trainings per activation, at least 2")
    parser.add_argument("--epochs", type=float, default=3, help="length of each training")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    # The demo recipe with another length, evaluated once at the end.
    recipe = replace(read_recipe("demo"), steps=None, epochs=options.epochs, evaluate_every=10**6, save_every=500)
    errors: dict[str, list[float]] = {activation: [] for activation in ORDER}
    for seed in range(options.seeds):  # by seed, so that an interrupted experiment has whole pairs
        for activation in ORDER:
            folder = options.runs / f"{activation}-{seed}"
            execution = Execution(device="cpu", cache=options.runs / "cache")
            one = train(replace(recipe, activation=activation, seed=seed), options.data, folder, execution=execution)
            errors[activation].append(one.errors.top1_error)
            print(f"{activation}, seed {seed}: {one.errors}", flush=True)
    differences = [_difference(errors, first, second) for first, second in PAIRS]
    result = {
        **circumstances(__file__, options, ("prelunet", "numpy", "torch")),
        "recipe": {key: value for key, value in recipe.to_json().items() if key not in {"activation", "seed"}},
        "top1_error": errors,
        "differences": differences,
    }
    print(_table(result))
    write_result(options.output, result, _table(result))


def _difference(errors: dict[str, list[float]], first: str, second: str) -> dict[str, Any]:
    """Return the difference of two activations over seeds."""
    found = np.subtract(errors[second], errors[first])
    mean, (low, high) = float(found.mean()), interval_of_mean(found)
    return {
        "a": first,
        "b": second,
        "by_seed": [round(float(value), 4) for value in found],
        "mean": round(mean, 4),
        "interval": [round(low, 4), round(high, 4)],
        "paper": None if (first, second) not in PAPER else round(PAPER[first, second], 4),
    }


def _table(result: dict[str, Any]) -> str:
    seeds = [
        (name, *(f"{value:.2f}" for value in values), f"{np.mean(values):.2f}")
        for name, values in result["top1_error"].items()
    ]
    count = len(seeds[0]) - 2
    differences = [
        (
            f"{found['b']} − {found['a']}",
            f"{found['mean']:+.2f} ({found['interval'][0]:+.2f} to {found['interval'][1]:+.2f})",
            None if found["paper"] is None else f"{found['paper']:+.2f}",
        )
        for found in result["differences"]
    ]
    return (
        f"# Activations on Fashion-MNIST\n\n{result['date']}, {result['machine']['cpu']}: `{result['command']}`\n\n"
        "Top-1 error, %, by seed:\n\n"
        f"{markdown(('activation', *(str(seed) for seed in range(count)), 'mean'), seeds)}\n\n"
        "Differences in points, mean over seeds and 95 % interval; the paper's are on ImageNet with model E:\n\n"
        f"{markdown(('difference', 'here', 'paper'), differences)}\n"
    )


if __name__ == "__main__":
    main()
