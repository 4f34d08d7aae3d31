"""A session on each of several identical GPUs, and the option that limits their memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.load import open_sessions
from prelunet.evaluator.engine.session import Placement
from prelunet.evaluator.errors import EnvironmentFault, UsageError
from tests.helpers.fakes import FakeSession

MODEL = Path("m.onnx")


class OpenedSession(FakeSession):
    """A session on one GPU of a machine. card: name of that GPU."""

    def __init__(self, placement: Placement, card: str, rules: BatchRules | None) -> None:
        super().__init__(provider="CUDAExecutionProvider" if placement.device == "cuda" else "CPUExecutionProvider")
        self.placement = placement
        self.circumstances = replace(self.circumstances, versions={"gpu": card})
        self.rules = rules or self.rules


class FakeGpus:
    """Some GPUs. calls: the options of each opening; cards, rules: of a GPU that differs from the others."""

    def __init__(self) -> None:
        self.count = 0
        self.calls: list[dict[str, Any]] = []
        self.cards: dict[int, str] = {}
        self.rules: dict[int, BatchRules] = {}

    def open(self, _path: Path, placement: Placement, **options: Any) -> OpenedSession:
        self.calls.append(options)
        device = placement.device if placement.device != "auto" else ("cuda" if self.count else "cpu")
        gpu = placement.gpu
        return OpenedSession(replace(placement, device=device), self.cards.get(gpu, "Card"), self.rules.get(gpu))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    found = FakeGpus()
    monkeypatch.setattr("prelunet.evaluator.engine.load.open_with_placement", found.open)
    monkeypatch.setattr("prelunet.evaluator.engine.load.visible_gpus", lambda: found.count)
    return found


@pytest.mark.parametrize(("requested", "opened"), [(1, [0]), (3, [0, 1, 2]), (0, [0, 1, 2, 3])])
def test_a_session_is_opened_on_each_gpu(machine: FakeGpus, requested: int, opened: list[int]) -> None:
    machine.count = 4
    for device in ("auto", "cuda"):
        sessions = open_sessions(MODEL, Placement(device, "tf32", gpu_memory=7), requested)
        expected = [Placement("cuda", "tf32", gpu=gpu, gpu_memory=7) for gpu in opened]
        assert [session.placement for session in sessions] == expected


def test_the_file_is_hashed_once_and_every_session_is_made_ready_for_many_images(machine: FakeGpus) -> None:
    machine.count = 3
    first, *_ = open_sessions(MODEL, Placement("cuda"), 3)
    known = {"preallocate": True, "digest": first.model_sha256}
    assert machine.calls == [{"preallocate": True}, known, known]


def test_more_gpus_than_there_are_and_gpus_on_a_cpu_are_refused(machine: FakeGpus) -> None:
    machine.count = 2
    with pytest.raises(EnvironmentFault, match=r"--gpus 3: only 2 are visible"):
        open_sessions(MODEL, Placement("cuda"), 3)
    for device in ("cpu", "openvino"):
        with pytest.raises(UsageError, match=rf"--gpus 2: --device {device} has no GPUs"):
            open_sessions(MODEL, Placement(device), 2)
    machine.count = 0
    with pytest.raises(EnvironmentFault, match=r"--gpus 0: CUDA is unavailable"):
        open_sessions(MODEL, Placement("auto"), 0)
    (only,) = open_sessions(MODEL, Placement("auto"), 1)
    assert only.placement.device == "cpu"


def test_cards_of_two_kinds_are_refused_naming_both(machine: FakeGpus) -> None:
    machine.count, machine.cards = 3, {2: "Other card"}
    assert len(open_sessions(MODEL, Placement("cuda"), 2)) == 2
    with pytest.raises(EnvironmentFault, match=r"versions\.gpu: Card GPU 0, Other card GPU 2"):
        open_sessions(MODEL, Placement("cuda"), 3)


def test_a_card_with_less_room_is_refused_with_the_limit_that_makes_all_identical(machine: FakeGpus) -> None:
    machine.count, machine.rules = 2, {1: BatchRules(max_pixels=4711)}
    with pytest.raises(EnvironmentFault, match=r"(?s)batching\.max_pixels: \d+ GPU 0, 4711 GPU 1.*--gpu-memory-limit"):
        open_sessions(MODEL, Placement("cuda"), 2)


# The option


@pytest.mark.parametrize("verb", ["validate", "bench"])
def test_limits_of_main_memory_and_of_the_gpu_are_two(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Placement] = []

    def opening(_path: Path, placement: Placement, _gpus: int) -> None:
        found.append(placement)
        raise UsageError("far enough")

    monkeypatch.setattr(f"prelunet.evaluator.verbs.{verb}.open_sessions", opening)
    call = [verb, "--model", "m.onnx", "--data", str(tmp_path), *(["--run", "r"] if verb == "validate" else [])]
    assert run([*call, "--memory-limit", "3G", "--gpu-memory-limit", "500M", "--device", "cuda"]) == 2
    assert run(call) == 2
    assert found == [Placement("cuda", memory=3 * 2**30, gpu_memory=500 * 2**20), Placement()]
    assert run([*call, "--gpu-memory-limit", "6"]) == 2
    assert "--gpu-memory-limit 6: not an amount of memory" in capsys.readouterr().err
    assert len(found) == 2
