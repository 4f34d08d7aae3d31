"""The cost of our training step compared with a minimal hand-written torch loop, on the same net and images.

    python -m benchmarks.training.step --output benchmarks/results/training-step-cpu.json

The loop has only the arithmetic of training: modules of torch.nn, cross entropy, SGD with momentum, no weight decay of
slopes, torch's dropout. Ours is `Trainer.step`: mean, dropout by (seed, step, row), gradients, the check that the loss
is finite, the update, the counts. Both repeat one synthetic batch. First, the losses of
both from the same weights without dropout must agree.

Both are timed with either channel order in memory (`--channels-last` and `--no-channels-last` of `train`), and the
faster of each counts. Steps take turns in random order within each round. The ratio is the median over rounds, its
interval the 2.5 % and 97.5 % quantiles of medians of resampled rounds. Goal: 1.05.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.results import circumstances, markdown, write_result
from benchmarks.common.runner import command_line
from prelunet.evaluator.architectures import Architecture, Pool
from prelunet.evaluator.machine import cores
from prelunet.training.data.loader import Batch
from prelunet.training.data.splits import embedded_dataset_path, open_splits
from prelunet.training.loop.trainer import SINGLE_PROCESS, Trainer
from prelunet.training.recipe import Recipe, read_recipe

CASES = ("demo:64:60", "E:8:16", "A:2:40")
GOAL = 1.05
AGREE = 1e-4  # relative to the first loss: only the order of summation differs
OURS, HAND = ("ours", "ours, channels last"), ("hand-written", "hand-written, channels last")
WARM = 3  # untimed rounds
DRAWS = 2000  # number of resamplings of the rounds
RATE = 1e-6  # one batch of noise, repeated: at their own rates A and E diverge, which ends the training


def main() -> None:
    """Measure and write the result."""
    parser = command_line(__doc__)
    parser.add_argument("--case", action="append", metavar="RECIPE:BATCH:ROUNDS", help=f"default: {' '.join(CASES)}")
    options = parser.parse_args()
    torch.set_num_threads(cores())
    results = []
    for text in options.case or CASES:
        name, batch, rounds = text.split(":")
        recipe = replace(read_recipe(name), batch=int(batch), steps=10**6, epochs=None, color=0.0, rate=RATE)
        recipe = replace(recipe, decay_biases=True, bias_rate=1.0)  # as in the hand-written loop
        found = _measure(recipe, int(rounds))
        results.append(found)
        print(f"{name}, batch {batch}: {found['ms']} ms, ratio {_ratio_text(found)}", flush=True)
    result = {**circumstances(__file__, options, ("prelunet", "numpy", "torch")), "goal": GOAL, "cases": results}
    write_result(options.output, result, _table(result))


def _measure(recipe: Recipe, rounds: int) -> dict[str, Any]:
    """Time all ways of a recipe, each once in every round."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        splits = open_splits(embedded_dataset_path())
        trainers = []
        for last in (False, True):
            (own := Path(folder) / str(last)).mkdir()
            trainers.append(Trainer(replace(recipe, channels_last=last), splits, own, SINGLE_PROCESS))
    classes = len(splits.classes)
    images = random.integers(0, 256, (recipe.batch, recipe.crop, recipe.crop, 3), dtype=np.uint8)
    batch = Batch(images, random.integers(0, classes, recipe.batch))
    ways: dict[str, Callable[[], object]] = {
        name: partial(trainer.step, batch) for name, trainer in zip(OURS, trainers, strict=True)
    }
    for name in HAND:
        ways[name] = _by_hand(trainers[0], batch, channels_last=name == HAND[1])
    first = _first_losses(trainers[0], batch)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM + rounds):
        for name in random.permutation(list(ways)):
            begun = time.perf_counter()
            ways[name]()
            if number >= WARM:
                seconds[name].append(time.perf_counter() - begun)
    ours, fastest = (min(names, key=lambda name: float(np.median(seconds[name]))) for names in (OURS, HAND))
    ratios = np.array(seconds[ours]) / np.array(seconds[fastest])
    low, high = np.quantile(np.median(random.choice(ratios, (DRAWS, rounds)), axis=1), (0.025, 0.975))
    return {
        "recipe": recipe.architecture,
        "batch": recipe.batch,
        "crop": recipe.crop,
        "rounds": rounds,
        "ms": {name: round(1e3 * float(np.median(times)), 2) for name, times in seconds.items()},
        "compared": [ours, fastest],
        "ratio": round(float(np.median(ratios)), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "first_loss": first,
    }


def _by_hand(trainer: Trainer, batch: Batch, *, channels_last: bool) -> Callable[[], object]:
    """Return a step of the hand-written loop."""
    recipe = trainer.recipe
    net = HandWritten(recipe.build_architecture(), len(trainer.splits.classes), recipe.dropout)
    if channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's annotations
    net.copy(trainer.net)
    slopes = [value for module in net.modules() if isinstance(module, nn.PReLU) for value in module.parameters()]
    others = [value for value in net.parameters() if not any(value is slope for slope in slopes)]
    groups = [{"params": others, "weight_decay": recipe.weight_decay}, {"params": slopes, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=recipe.rate, momentum=recipe.momentum)
    mean, labels = trainer.mean.permute(2, 0, 1).contiguous(), torch.from_numpy(batch.labels)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.from_numpy(batch.images).permute(0, 3, 1, 2).contiguous(memory_format=layout)

    def step() -> float:
        net.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images.float() - mean), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


class HandWritten(nn.Module):
    """A net of the paper in modules of torch.nn, with PReLU per channel."""

    def __init__(self, architecture: Architecture, classes: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for layer in architecture.trunk:
            if isinstance(layer, Pool):
                layers.append(nn.MaxPool2d(layer.kernel, layer.stride))
            else:
                layers += [
                    nn.Conv2d(channels, layer.channels, layer.kernel, layer.stride, layer.pad),
                    nn.PReLU(layer.channels),
                ]
                channels = layer.channels
        self.trunk = nn.Sequential(*layers)
        self.levels = nn.ModuleList(nn.AdaptiveMaxPool2d(level) for level in architecture.spp_levels)
        fc1, fc2 = architecture.widths
        self.head = nn.Sequential(
            nn.Linear(architecture.bins * channels, fc1), nn.PReLU(fc1), nn.Dropout(dropout),
            nn.Linear(fc1, fc2), nn.PReLU(fc2), nn.Dropout(dropout), nn.Linear(fc2, classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        maps = self.trunk(images)
        logits: Tensor = self.head(torch.cat([level(maps).flatten(1) for level in self.levels], dim=1))
        return logits

    @torch.no_grad()
    def copy(self, net: nn.Module) -> None:
        """Copy the parameters of our net, which have the same order."""
        for mine, theirs in zip(self.parameters(), net.parameters(), strict=True):
            mine.copy_(theirs)


def _first_losses(trainer: Trainer, batch: Batch) -> dict[str, float]:
    """Return the loss of both nets with equal weights and no dropout; raises SystemExit if they differ."""
    images, labels = trainer.preprocess(batch), torch.from_numpy(batch.labels)
    net = HandWritten(trainer.recipe.build_architecture(), len(trainer.splits.classes), 0.0)
    net.copy(trainer.net)
    with torch.no_grad():
        found = {OURS[0]: F.cross_entropy(trainer.net(images), labels).item()}
        mean = trainer.mean.permute(2, 0, 1)
        by_hand = net(torch.from_numpy(batch.images).permute(0, 3, 1, 2).float() - mean)
        found[HAND[0]] = F.cross_entropy(by_hand, labels).item()
    if abs(found[OURS[0]] - found[HAND[0]]) > AGREE * abs(found[OURS[0]]):
        raise SystemExit(f"the two nets differ: their first losses are {found}. Their times would mean nothing")
    return found


def _ratio_text(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return f"{found['ratio']:.3f} ({low:.3f} to {high:.3f})"


def _table(result: dict[str, Any]) -> str:
    rows = [
        (
            case["recipe"], case["batch"], case["crop"], *(case["ms"][name] for name in (*OURS, *HAND)),
            _ratio_text(case),
        )
        for case in result["cases"]
    ]  # fmt: skip
    table = markdown(("net", "batch", "crop", *(f"{name}, ms" for name in (*OURS, *HAND)), "ratio"), rows)
    machine = result["machine"]
    return (
        "# A training step compared with a minimal loop\n\n"
        f"{result['date']}, {machine['cpu']}, {machine['cores']} cores, torch {result['versions']['torch']}: "
        f"`{result['command']}`\n\n{table}\n\n"
        f"Ratio: the faster of ours to the faster loop, median over rounds and 95 % interval; goal {result['goal']}.\n"
    )


if __name__ == "__main__":
    main()
