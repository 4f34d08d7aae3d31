"""run.json records which images are computed together, which differs on a GPU."""

from typing import Any

import pytest

from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.run import Batching, batching_from_json, build_run_info, run_info_from_json
from tests.helpers.fakes import FakeSession, fake_contract

DATASET = {"name": "val", "fingerprint": "ab" * 32, "images": 5000, "layout": "class folders", "selection": None}


def test_a_run_on_a_gpu_has_larger_chunks_and_its_rules_survive_the_file() -> None:
    infos = {}
    for provider in ("CPUExecutionProvider", "CUDAExecutionProvider"):
        session = FakeSession(provider=provider)
        infos[provider] = build_run_info(session, "m.onnx", DATASET, build_protocol("multi-scale", session.contract))
        assert run_info_from_json(infos[provider].to_json()) == infos[provider]
        assert infos[provider].batching == Batching(infos[provider].chunk, session.rules)
    cpu, gpu = infos.values()
    assert (cpu.chunk, gpu.chunk) == (64, 1024)


def test_a_memory_limit_makes_the_portions_smaller_on_a_cpu() -> None:
    session = FakeSession(fake_contract(max_side=4096))
    protocol = build_protocol("dense-1000", session.contract)
    free, limited = (
        build_run_info(session, "m.onnx", DATASET, protocol, memory=memory) for memory in (None, 3 * 2**29)
    )
    assert free.batching is not None
    assert limited.batching is not None
    assert 1 < limited.batching.images_together < free.batching.images_together


@pytest.mark.parametrize(
    "data",
    [
        [],
        {},
        {"images_together": 4},
        {"images_together": 0, **BatchRules().to_json()},
        {"images_together": "4", **BatchRules().to_json()},
        {"images_together": 4, **BatchRules().to_json(), "rows": 3},
        {"images_together": 4, **BatchRules().to_json(), "canvas_step": 0},
    ],
)
def test_invalid_batching_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"batching|images_together|rules|canvas_step"):
        batching_from_json(data)
