import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from prelunet.evaluator.errors import EnvironmentFault, UsageError
from prelunet.training.distributed.base import StepOptions, check_batch, split_evenly
from prelunet.training.distributed.data_parallel import build_parallel
from prelunet.training.distributed.process_group import ProcessGroup, open_process_group
from prelunet.training.net.initialization import FC_LAYERS
from prelunet.training.net.network import PreluNet
from tests.training.distributed import parallel_work as work
from tests.training.distributed.gloo import run_in_processes, run_to_the_end

KINDS_OF_MANY = ("ddp", "hybrid")
SIZES = (2, 4)
CPU = torch.device("cpu")

# Float32 sums in another order differ by a few units in the last place, 6e-8, of their largest term; gradients pass
# about ten layers. In float64 both would agree to 1e-14.
SUMS = 1e-5


@pytest.fixture(scope="module")
def everything() -> dict[int, list[dict[str, Any]]]:
    """Return the results of every process, by group size and rank."""
    return {size: run_in_processes(size, work.take_all_steps, size == 2, seconds=200) for size in SIZES}


def assert_gradients(found: work.Arrays, expected: work.Arrays, tolerance: float, what: Any) -> None:
    """Compare each tensor with a tolerance relative to its largest value."""
    for name, gradient in found.items():
        off = np.abs(gradient - expected[name]).max() / np.abs(expected[name]).max()
        assert off <= tolerance, f"{what}: {name} is off by {off:.1e} of its largest value"


@pytest.fixture(scope="module")
def plain() -> dict[tuple[int, str], tuple[float, work.Arrays]]:
    """Return loss and gradients of one process, for every batch and precision of `cases_for`."""
    found = {}
    for batch, precision in {(one.batch, one.options.precision) for size in SIZES for one in work.cases_for(size)}:
        net = work.net_of(0)
        loss = work.plain_step(net, 2, batch, precision)
        found[batch, precision] = loss, work.gradients_of(net)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_every_process_has_the_gradients_of_one_process_with_the_whole_batch(everything, plain, size: int) -> None:
    for case in work.cases_for(size):
        # Each rounding to bf16 changes a sum by up to 0.4 %; a wrong scale or a lost row changes it far more
        tolerance = 0.02 if case.options.precision == "bf16" else SUMS
        loss, gradients = plain[case.batch, case.options.precision]
        for rank, found in enumerate(everything[size]):
            one = found["cases"][case]
            assert one["loss"] == pytest.approx(loss, rel=tolerance), (case, rank)
            assert_gradients(one["gradients"], gradients, tolerance, (case, rank))


@pytest.mark.parametrize("size", SIZES)
def test_every_process_has_the_error_of_the_whole_batch(everything, size: int) -> None:
    for case in work.cases_for(size):
        if case.options.precision == "fp32":  # bf16 may decide a close call otherwise
            expected = work.plain_error(work.net_of(0), 2, case.batch)
            errors = [found["cases"][case]["error"] for found in everything[size]]
            assert errors == pytest.approx([expected] * size, abs=1e-6), case  # float32 sums of shares


def test_compiled_nets_have_the_same_gradients(everything, plain) -> None:
    for rank, found in enumerate(everything[2]):
        loss, gradients = found["compiled"]
        assert loss == pytest.approx(plain[5, "fp32"][0], rel=SUMS)
        assert_gradients(gradients, plain[5, "fp32"][1], SUMS, rank)


@pytest.mark.parametrize("size", SIZES)
def test_in_hybrid_training_only_the_first_process_has_the_fully_connected_layers(everything, size: int) -> None:
    names = {name for name, _ in work.net_of(0).named_parameters()}
    trunk = {name for name in names if name.split(".")[0] not in FC_LAYERS}
    assert len(trunk) == 6
    for rank, found in enumerate(everything[size]):
        for case, one in found["cases"].items():
            assert set(one["gradients"]) == (names if case.kind == "ddp" or rank == 0 else trunk)
        assert found["hybrid"]["curve"]["remembered"] == (14 if rank == 0 else 6)


@pytest.mark.parametrize("kind", KINDS_OF_MANY)
@pytest.mark.parametrize("size", SIZES)
def test_twenty_steps_with_dropout_have_the_losses_and_the_weights_of_one_process(
    everything, size: int, kind: str
) -> None:
    net = work.net_of(0)
    optimizer = work.sgd(net)
    losses = []
    for step in range(work.CURVE_STEPS):
        losses.append(work.plain_step(net, step, work.CURVE_BATCH))
        optimizer.step()
    assert max(losses) / min(losses) > 1.5, "a flat curve would show nothing"
    weights = {name: parameter.detach().numpy() for name, parameter in net.named_parameters()}
    for rank, found in enumerate(everything[size]):
        curve = found[kind]["curve"]
        np.testing.assert_allclose(curve["losses"], losses, rtol=SUMS)
        assert_gradients(curve["weights"], weights, SUMS, (kind, rank))


@pytest.mark.parametrize("kind", KINDS_OF_MANY)
@pytest.mark.parametrize("size", SIZES)
def test_each_process_gets_the_logits_of_its_own_rows_and_may_have_none(everything, size: int, kind: str) -> None:
    net = work.net_of(0)
    for rank, found in enumerate(everything[size]):
        with torch.no_grad():
            expected = net(work.batch_of(100 + rank, max(rank, 1))[0])[:rank]
        assert found[kind]["logits"].shape == (rank, work.CLASSES)
        # Values about 1; other numbers of rows may use other routines
        np.testing.assert_allclose(found[kind]["logits"], expected.numpy(), rtol=SUMS, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS_OF_MANY)
@pytest.mark.parametrize("size", SIZES)
def test_a_stop_request_of_one_process_reaches_all_in_the_same_step_only(everything, size: int, kind: str) -> None:
    assert [found[kind]["stops"] for found in everything[size]] == [[False, True, False]] * size


@pytest.mark.parametrize("kind", KINDS_OF_MANY)
@pytest.mark.parametrize("size", SIZES)
def test_a_non_finite_loss_reaches_all_processes_and_does_not_affect_the_next_step(
    everything, size: int, kind: str
) -> None:
    plain = work.plain_step(work.net_of(0), 1, 6)
    for found in everything[size]:
        not_finite, next_one = found[kind]["losses with NaN"]
        assert np.isnan(not_finite)
        assert next_one == pytest.approx(plain, rel=SUMS)


@pytest.mark.parametrize("kind", KINDS_OF_MANY)
def test_gradients_are_sent_while_backward_is_running(everything, kind: str) -> None:
    assert all(found[kind]["missing at first"] > 0 for found in everything[2])


@pytest.mark.parametrize("size", SIZES)
def test_in_hybrid_training_the_gradients_of_the_fully_connected_layers_are_not_sent(everything, size: int) -> None:
    parameters = {name: parameter.numel() for name, parameter in work.net_of(0).named_parameters()}
    trunk = sum(count for name, count in parameters.items() if name.split(".")[0] not in FC_LAYERS)
    for found in everything[size]:
        assert (found["ddp"]["sent"], found["hybrid"]["sent"]) == (sum(parameters.values()), trunk)


def test_totals_and_flags_cover_all_processes(everything) -> None:
    for size in SIZES:
        for found in everything[size]:
            assert found["sums"] == [sum(range(size)), size / 2]
            assert (found["any"], found["none"]) == (True, False)


@pytest.mark.parametrize(("kind", "victim"), [("ddp", 0), ("hybrid", 3)])
def test_when_a_process_is_killed_the_others_report_it_within_seconds_with_advice(kind: str, victim: int) -> None:
    begun = time.time()
    ended = run_to_the_end(4, work.train_until_one_is_killed, kind, victim, seconds=60)
    assert ended.pop(victim).exit_code == -9
    for one in ended:
        assert (one.error, one.exit_code) == (None, 0), "no process hangs or dies"
        text, when = one.value
        assert "has died" in text
        assert "run the same command again" in text
        assert "/" not in text, "no path of torch's source"
        assert when - begun < 30, "far less than TIMEOUT"


def test_a_process_raises_its_own_error_and_the_others_report_its_death() -> None:
    first, second = run_in_processes(2, work.train_until_one_gives_up, "hybrid", seconds=60)
    assert second == "ValueError: my own error"
    assert first.startswith("EnvironmentFault: a process of this run has died")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with open_process_group("cpu") as group:
        yield group


@pytest.mark.parametrize(
    "options", [StepOptions(), StepOptions(accumulate=2), StepOptions(accumulate=5), StepOptions(channels_last=True)]
)
def test_a_single_process_has_the_gradients_of_a_plain_step_in_either_mode(
    alone: ProcessGroup, plain, options: StepOptions
) -> None:
    for kind in ("ddp", "hybrid"):
        parallel = build_parallel(kind, work.net_of(0), alone, options)
        work.parallel_step(parallel, 1, 7)
        step = work.parallel_step(parallel, 2, 5, stop=kind == "ddp")
        assert step.loss == pytest.approx(plain[5, "fp32"][0], rel=SUMS)
        assert step.stop == (kind == "ddp")
        assert_gradients(work.gradients_of(parallel.net), plain[5, "fp32"][1], SUMS, kind)


def test_totals_of_a_single_process_are_its_own_values(alone: ProcessGroup) -> None:
    assert (alone.rank, alone.size, alone.is_first, alone.device) == (0, 1, True, CPU)
    assert alone.total(2, 0.5) == [2.0, 0.5]
    assert (alone.any(True), alone.any(False)) == (True, False)
    alone.wait()


def test_dropout_is_drawn_once_per_step_with_any_number_of_micro_batches(alone: ProcessGroup) -> None:
    images, labels = work.batch_of(3, 6)
    drawn: list[range] = []

    def factors(rows: range) -> tuple[np.ndarray, np.ndarray]:
        drawn.append(rows)
        return (np.ones((len(rows), work.SMALL.hidden), np.float32),) * 2

    build_parallel("ddp", work.net_of(0), alone, StepOptions(accumulate=3)).gradients(images, labels, factors, 6)
    assert drawn == [range(6)]


@pytest.mark.parametrize("last", [False, True])
def test_the_memory_format_follows_the_option_not_the_input(
    alone: ProcessGroup, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    seen: list[torch.Tensor] = []
    trunk = PreluNet.trunk
    monkeypatch.setattr(PreluNet, "trunk", lambda net, given: seen.append(given) or trunk(net, given))
    parallel = build_parallel("ddp", work.net_of(0), alone, StepOptions(channels_last=last))
    images, labels = work.batch_of(3, 4)
    for some in (images.contiguous(), images.contiguous(memory_format=torch.channels_last)):
        parallel.gradients(some, labels, None, 4)
    assert [one.is_contiguous(memory_format=torch.channels_last) for one in seen] == [last, last]
    assert [one.is_contiguous() for one in seen] == [not last, not last]


def test_without_dropout_gradients_equal_those_of_the_plain_net(alone: ProcessGroup) -> None:
    images, labels = work.batch_of(3, 4)
    net = work.net_of(0)
    torch.nn.functional.cross_entropy(net(images), labels).backward()
    parallel = build_parallel("ddp", work.net_of(0), alone)
    parallel.gradients(images, labels, None, 4)
    assert_gradients(work.gradients_of(parallel.net), work.gradients_of(net), SUMS, "no dropout")


@pytest.mark.parametrize(("rows", "parts"), [(0, 3), (3, 4), (5, 2), (5, 4), (128, 8), (7, 1)])
def test_parts_of_a_batch_cover_it_in_order_with_sizes_that_differ_by_at_most_one(rows: int, parts: int) -> None:
    found = split_evenly(range(10, 10 + rows), parts)
    assert [row for part in found for row in part] == list(range(10, 10 + rows))
    assert len(found) == parts
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_a_batch_with_fewer_rows_than_processes_or_parts_is_refused() -> None:
    check_batch(4, ProcessGroup(0, 4, CPU), StepOptions())
    with pytest.raises(UsageError, match=r"a batch of 3 cannot be split into 4 parts \(4 processes"):
        check_batch(3, ProcessGroup(0, 4, CPU), StepOptions())
    with pytest.raises(UsageError, match="lower accumulate"):
        check_batch(7, ProcessGroup(0, 4, CPU), StepOptions(accumulate=2))


def test_an_incomplete_torchrun_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="has RANK, but not WORLD_SIZE"), open_process_group("cpu"):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    fault = "not LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Start the processes with torchrun"
    with pytest.raises(UsageError, match=fault), open_process_group("cpu"):
        pass


@pytest.mark.parametrize(("rank", "size", "fault"), [("5", "2", "RANK is 5 and WORLD_SIZE 2"), ("0", "x", "'x'")])
def test_a_torchrun_environment_in_which_processes_would_wait_for_others_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str, fault: str
) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": "0", **address}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"wrong variables of torchrun: .*{fault}"), open_process_group("cpu"):
        pass


def test_unavailable_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with (
        pytest.raises(UsageError, match=r"unknown device 'tpu'\. Choose one of cpu, cuda"),
        open_process_group("tpu"),
    ):
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFault, match="torch finds no GPU"), open_process_group("cuda"):
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    fault = r"process 0 .* has no GPU: this machine has only 0"
    with pytest.raises(EnvironmentFault, match=fault), open_process_group("cuda"):
        pass
