"""The work of the processes in test_parallel.py, and plain training to compare it with."""

import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prelunet.evaluator.architectures import Architecture, Conv, Pool, parameter_shapes
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.training.distributed.base import DropoutFactors, ParallelMode, ParallelNet, StepOptions, StepResult
from prelunet.training.distributed.data_parallel import build_parallel
from prelunet.training.distributed.gradient_buckets import GradientBuckets
from prelunet.training.distributed.process_group import ProcessGroup, open_process_group
from prelunet.training.net.network import PreluNet, load_tensors, parameter_groups
from prelunet.training.recipe import TrainingPrecision

SMALL = Architecture(
    "small",
    (Conv("conv1", 6, kernel=3, pad=1), Pool("pool1", kernel=2, stride=2), Conv("conv2", 7, kernel=3, pad=1)),
    spp_levels=(3, 2, 1),
    hidden=16,
    crop=12,
)
CLASSES = 5
BUCKET = 1570  # bytes: conv2 fills one bucket, conv1 is in another, and fc1.weight exceeds the capacity
CURVE_STEPS, CURVE_BATCH = 20, 7
PLAIN = StepOptions()
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One step in parallel."""

    kind: ParallelMode
    batch: int
    options: StepOptions = PLAIN


def cases_for(size: int) -> list[Case]:
    """Return the steps of such a group: batches that divide evenly and unevenly."""
    plain = [Case(kind, batch) for kind in ("ddp", "hybrid") for batch in (8, 5)]
    others = [
        StepOptions(accumulate=2),
        StepOptions(accumulate=3),
        StepOptions(channels_last=True),
        StepOptions(precision="bf16"),
    ]
    return plain + [Case(kind, 13, options) for kind in ("ddp", "hybrid") for options in others[: 8 // size]]


def net_of(seed: int) -> PreluNet:
    """Build a net with positive and negative responses."""
    rng = np.random.default_rng(seed)
    ranges = {"weight": (-0.3, 0.3), "bias": (-0.5, 0.5), "slope": (-0.3, 1.2)}
    net = PreluNet(SMALL, CLASSES)
    shapes = parameter_shapes(SMALL, CLASSES).items()
    load_tensors(
        net, {name: rng.uniform(*ranges[name.split(".")[1]], shape).astype(np.float32) for name, shape in shapes}
    )
    return net


def batch_of(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return images and labels."""
    rng = np.random.default_rng(seed)
    images = rng.normal(0, 1, (rows, 3, SMALL.crop, SMALL.crop)).astype(np.float32)
    return torch.from_numpy(images), torch.from_numpy(rng.integers(1, CLASSES, rows))


def factors_of(seed: int, batch: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
    """Drop half of the units; those of a row do not depend on the process."""
    drawn = np.random.default_rng(1000 + seed).integers(0, 2, (2, batch, SMALL.hidden)) * np.float32(2)
    return drawn[0, rows.start : rows.stop].astype(np.float32), drawn[1, rows.start : rows.stop].astype(np.float32)


def dropout(seed: int, batch: int) -> DropoutFactors:
    """Return what `gradients` takes."""
    return partial(factors_of, seed, batch)


def plain_step(net: PreluNet, seed: int, batch: int, precision: TrainingPrecision = "fp32") -> float:
    """Compute the gradients of a batch's mean loss into the net, without any of our code for steps."""
    images, labels = batch_of(seed, batch)
    of_fc1, of_fc2 = factors_of(seed, batch, range(batch))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        logits = net(images, (torch.from_numpy(of_fc1), torch.from_numpy(of_fc2)))
    loss = F.cross_entropy(logits.float(), labels)
    net.zero_grad()
    loss.backward()
    return loss.item()


def plain_error(net: PreluNet, seed: int, batch: int) -> float:
    """Return the fraction of a batch that is misclassified, image by image."""
    images, labels = batch_of(seed, batch)
    factors = [torch.from_numpy(of_layer) for of_layer in factors_of(seed, batch, range(batch))]
    with torch.no_grad():
        rows = [net(images[[i]], (factors[0][[i]], factors[1][[i]]))[0] for i in range(batch)]
    return sum(int(row.argmax()) != int(label) for row, label in zip(rows, labels, strict=True)) / batch


def parallel_step(parallel: ParallelNet, seed: int, batch: int, **more: Any) -> StepResult:
    """Take a step with this process's rows of that batch."""
    images, labels = batch_of(seed, batch)
    own = parallel.rows(batch)
    return parallel.gradients(
        images[own.start : own.stop], labels[own.start : own.stop], dropout(seed, batch), batch, **more
    )


def gradients_of(net: PreluNet) -> Arrays:
    """Return the gradients of the net's parameters."""
    return {name: parameter.grad.numpy().copy() for name, parameter in net.named_parameters()}


def sgd(net: PreluNet) -> torch.optim.SGD:
    """Return the optimizer of all comparisons."""
    return torch.optim.SGD(parameter_groups(net, 5e-4), lr=0.01, momentum=0.9)


# The following functions run in each process.


def take_all_steps(compiled: bool) -> dict[str, Any]:
    """Compute everything that is compared, since starting a process takes longer."""
    GradientBuckets.capacity = BUCKET
    with open_process_group("cpu") as group:
        found: dict[str, Any] = {"sums": group.total(group.rank, 0.5), "any": group.any(group.rank == 1)}
        found["none"] = group.any(False)
        found["cases"] = {case: _one_case(case, group) for case in cases_for(group.size)}
        for kind in ("ddp", "hybrid"):
            found[kind] = {
                "curve": _curve(kind, group),
                "logits": _logits(kind, group),
                "stops": _stops(kind, group),
                "losses with NaN": _not_finite(kind, group),
                **_sent(kind, group),
            }
        if compiled:
            torch.compile = partial(
                torch.compile, backend="aot_eager"
            )  # as inductor, but without a C++ compiler and a minute of compilation
            parallel = _parallel("hybrid", group, StepOptions(compile=True))
            found["compiled"] = parallel_step(parallel, 2, 5).loss, gradients_of(parallel.net)
    return found


def _parallel(kind: ParallelMode, group: ProcessGroup, options: StepOptions = PLAIN) -> ParallelNet:
    return build_parallel(kind, net_of(0), group, options)


def _one_case(case: Case, group: ProcessGroup) -> dict[str, Any]:
    """Take two steps and return the result of the second, on which the first must have no effect."""
    parallel = _parallel(case.kind, group, case.options)
    parallel_step(parallel, 1, case.batch + 2)
    step = parallel_step(parallel, 2, case.batch)
    return {"loss": step.loss, "error": step.error, "gradients": gradients_of(parallel.net)}


def _curve(kind: ParallelMode, group: ProcessGroup) -> dict[str, Any]:
    parallel = _parallel(kind, group)
    optimizer = sgd(parallel.net)
    losses = []
    for number in range(CURVE_STEPS):
        losses.append(parallel_step(parallel, number, CURVE_BATCH).loss)
        optimizer.step()
    weights = {name: parameter.detach().numpy().copy() for name, parameter in parallel.net.named_parameters()}
    return {"losses": losses, "weights": weights, "remembered": len(optimizer.state)}


def _logits(kind: ParallelMode, group: ProcessGroup) -> np.ndarray:
    """Classify as many rows as this process's rank: the first has none."""
    parallel = _parallel(kind, group)
    return parallel.logits(batch_of(100 + group.rank, group.rank)[0]).numpy()


def _stops(kind: ParallelMode, group: ProcessGroup) -> list[bool]:
    parallel = _parallel(kind, group)
    last = group.rank == group.size - 1
    return [parallel_step(parallel, 1, 5, stop=stop and last).stop for stop in (False, True, False)]


def _not_finite(kind: ParallelMode, group: ProcessGroup) -> list[float]:
    """Return the losses of a step with a NaN in the last process's rows, and of the next step."""
    parallel = _parallel(kind, group)
    images, labels = batch_of(1, 6)
    images[-1, 1, 2, 3] = torch.nan
    own = parallel.rows(6)
    here = slice(own.start, own.stop)
    return [parallel.gradients(images[here], labels[here], None, 6).loss, parallel_step(parallel, 1, 6).loss]


def _sent(kind: ParallelMode, group: ProcessGroup) -> dict[str, int]:
    """Return how many gradients a step sends, and how many backward had not computed yet when the first were sent."""
    parallel = _parallel(kind, group)
    missing: list[int] = []
    sent: list[int] = []
    all_reduce = ProcessGroup.all_reduce

    def watched(self: ProcessGroup, tensor: Tensor) -> Any:
        missing.append(sum(bucket.missing for bucket in parallel.buckets.buckets))
        sent.append(tensor.numel() - 3)  # beside the gradients: loss, error and the stop request
        return all_reduce(self, tensor)

    ProcessGroup.all_reduce = watched
    try:
        parallel_step(parallel, 1, 8)
    finally:
        ProcessGroup.all_reduce = all_reduce
    return {"sent": sum(sent), "missing at first": missing[0]}


def train_until_one_is_killed(kind: ParallelMode, victim: int) -> tuple[str, float]:
    """Return the error of the surviving processes, and its time (time.time())."""
    GradientBuckets.capacity = BUCKET
    try:
        with open_process_group("cpu") as group:
            parallel = _parallel(kind, group)
            if group.rank == victim:  # in the middle of backward, while some buckets are being sent
                hook = parallel.net.get_parameter("conv2.weight").register_post_accumulate_grad_hook
                steps = iter(range(3))
                hook(lambda _: None if next(steps, None) is not None else os.kill(os.getpid(), signal.SIGKILL))
            for number in range(1000):
                parallel_step(parallel, number, 8)
    except EnvironmentFault as error:
        return str(error), time.time()
    raise AssertionError("no process died")


def train_until_one_gives_up(kind: ParallelMode) -> str:
    """Return the error of each process when the last one fails by itself."""
    try:
        with open_process_group("cpu") as group:
            parallel = _parallel(kind, group)
            for number in range(1000):
                if number == 3 and group.rank == group.size - 1:
                    raise ValueError("my own error")
                parallel_step(parallel, number, 8)
    except (EnvironmentFault, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no process failed")
