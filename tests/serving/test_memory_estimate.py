"""The memory estimate of a server before it answers calls."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from prelunet.evaluator.engine.memory import estimate_memory, image_bytes
from prelunet.evaluator.engine.session import Placement
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.decode import max_decode_bytes
from prelunet.evaluator.machine import cores, parse_memory
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.serving.memory import serving_memory
from prelunet.evaluator.serving.options import ModelFile, QueueOptions, ServeOptions
from prelunet.evaluator.serving.scheduling.admission import with_reserve
from tests.helpers.fakes import FakeSession, fake_contract

OPTIONS = ServeOptions((ModelFile("a", Path("a.onnx")),))
ARRIVING = 2**28 + 2560 * 2**16  # of messages that are being read, and ahead of that by each call


def fakes() -> list[FakeSession]:
    """Return two models; the second takes more memory to load and less afterwards."""
    sessions = [FakeSession(), FakeSession(fake_contract(classes=3, default_scales=(40, 90)))]
    sessions[0].model_bytes, sessions[1].model_bytes = 500 * 2**20, 300 * 2**20
    return sessions


def test_two_models_take_the_sum_of_their_weights_batches_and_queues() -> None:
    sessions, queue = fakes(), OPTIONS.queue
    needs = []
    for session in sessions:
        protocol = build_protocol("multi-scale", session.contract)
        alone = serving_memory([session], OPTIONS)  # type: ignore[list-item]
        needs.append(alone)
        validation = estimate_memory(session, protocol, 1, None)  # type: ignore[arg-type]
        assert (alone.base, alone.packed) == (validation.base, validation.packed)
        assert alone.decoding > max_decode_bytes(OPTIONS.limits.image), "the largest image is decoded beside easy ones"
        waiting = 2 * with_reserve(queue.max_bytes) + queue.ready_bytes + cores() * image_bytes(protocol)
        assert alone.images == waiting + ARRIVING
    both = serving_memory(sessions, OPTIONS)  # type: ignore[arg-type]
    for part in ("weights", "batch", "packed", "results"):
        assert getattr(both, part) == sum(getattr(need, part) for need in needs), part
    assert both.base == needs[0].base
    assert both.loading == max(needs[0].loading, needs[0].weights + needs[1].loading)
    assert both.images == sum(need.images for need in needs) - ARRIVING - queue.ready_bytes - cores() * min(
        image_bytes(build_protocol("multi-scale", session.contract)) for session in sessions
    )


def test_lanes_take_a_second_copy_of_the_weights_and_of_the_batches() -> None:
    sessions = [FakeSession(), FakeSession()]
    for session in sessions:
        session.model_bytes = 50 * 2**20
    sessions[1].lanes = 4
    alone, with_lanes = (serving_memory([session], OPTIONS) for session in sessions)  # type: ignore[list-item]
    doubled = {part: 2 * getattr(alone, part) for part in ("weights", "batch")}
    assert with_lanes == replace(alone, **doubled, loading=alone.loading + alone.weights)


def test_a_smaller_queue_takes_less_by_twice_its_bytes_and_their_reserve() -> None:
    smaller = replace(OPTIONS, queue=QueueOptions(max_bytes=2**20))
    saved = serving_memory(fakes(), OPTIONS).total - serving_memory(fakes(), smaller).total  # type: ignore[arg-type]
    assert saved == 2 * 2 * 1.25 * (OPTIONS.queue.max_bytes - 2**20), "with the quarter for clients below their share"


def test_more_arriving_bytes_take_more_and_at_least_one_message_is_counted() -> None:
    def needed(arriving: int) -> int:
        limits = replace(OPTIONS.limits, arriving_bytes=arriving)
        return serving_memory(fakes(), replace(OPTIONS, limits=limits)).total  # type: ignore[arg-type]

    assert needed(2**29) - needed(2**28) == 2**28
    assert needed(2**28) - needed(1) == 2**28 - OPTIONS.limits.max_message_bytes


def test_a_limit_that_is_too_low_is_refused_with_a_sufficient_one() -> None:
    need = serving_memory(fakes(), OPTIONS).total  # type: ignore[arg-type]
    assert need > 2**31
    with pytest.raises(UsageError, match=r"--memory-limit 1\.00G: serving needs at least .* Give that, or"):
        serving_memory(fakes(), replace(OPTIONS, placement=Placement(memory=2**30)))  # type: ignore[arg-type]
    assert serving_memory(fakes(), replace(OPTIONS, placement=Placement(memory=need)))  # type: ignore[arg-type]


def test_the_advised_limit_is_enough_although_batches_grow_with_it() -> None:
    sessions = [FakeSession(fake_contract(max_side=4096))]
    with pytest.raises(UsageError) as refused:
        serving_memory(sessions, replace(OPTIONS, placement=Placement(memory=2**29)))  # type: ignore[arg-type]
    advised = re.search(r"needs at least (\S+),", str(refused.value))
    assert advised is not None
    limit = parse_memory(advised[1])
    assert serving_memory(sessions, replace(OPTIONS, placement=Placement(memory=limit)))  # type: ignore[arg-type]
