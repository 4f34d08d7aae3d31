"""A session runs on the requested device or raises an error; a recording fake stands in for the runtime.

test_export.py tests how the real runtime answers damaged files and wrong canvases.
"""

import hashlib
import importlib.util
import math
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from prelunet.evaluator.contract import INPUTS, OUTPUTS, GoldenImage, ModelContract, golden_image
from prelunet.evaluator.engine import load
from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.load import MAX_LANES_BYTES, choose_cpu_device, open_session, open_with_placement
from prelunet.evaluator.engine.memory import gpu_rules
from prelunet.evaluator.engine.runtimes import Device
from prelunet.evaluator.engine.runtimes import onnx as onnx_runtime
from prelunet.evaluator.engine.runtimes.base import Precision, error_summary, is_out_of_memory
from prelunet.evaluator.engine.session import Circumstances, Placement, Session
from prelunet.evaluator.errors import ContractError, EnvironmentFault, UsageError
from prelunet.evaluator.serving.models import ModelFile, load_model
from tests.engine.contracts import build_contract
from tests.engine.runtimes.fake_runtime import (
    CPU,
    CUDA,
    GIB,
    OPENVINO,
    FakeBinding,
    FakeCudaRuntime,
    FakeRuntime,
    nothing,
    runtime_error,
)
from tests.helpers.fakes import fake_contract


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"any bytes")
    return path


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch):
    """Give a function that puts a fake in the runtime's place."""

    def put(runtime: FakeRuntime) -> FakeRuntime:
        monkeypatch.setattr(onnx_runtime, "import_runtime", lambda: runtime)
        monkeypatch.setattr(onnx_runtime, "CudaRuntime", FakeCudaRuntime)
        monkeypatch.setattr(onnx_runtime, "CudaBinding", FakeBinding)
        FakeBinding.staged.clear()
        FakeBinding.computes = staticmethod(nothing)
        return runtime

    return put


@pytest.mark.parametrize("instead", [CPU, OPENVINO])
def test_when_cuda_is_requested_another_provider_is_an_error_that_names_both_and_never_a_session(
    use, model: Path, instead: str
) -> None:
    runtime = use(FakeRuntime(CUDA, actual=instead))
    with pytest.raises(EnvironmentFault, match=rf"--device cuda: {CUDA} is unavailable.* offers {instead} instead"):
        open_session(model, "cuda")
    assert runtime.events[-2:] == ["preload_dlls", f"load on {CUDA}"], "the CPU should not be tried"


def test_when_cuda_is_requested_a_driver_that_fails_is_an_error_with_the_runtimes_words(use, model: Path) -> None:
    use(FakeRuntime(CUDA, fails={CUDA: runtime_error("EPFail", "CUDA driver\nversion is insufficient")}))
    with pytest.raises(EnvironmentFault, match=r"--device cuda: .*model\.onnx .*CUDA driver version is insufficient"):
        open_session(model, "cuda")


def test_when_cuda_is_requested_a_runtime_that_knows_none_is_an_error_that_names_the_extra(use, model: Path) -> None:
    runtime = use(FakeRuntime())
    with pytest.raises(EnvironmentFault, match=r"--device cuda: .*has no CUDA support.*\[gpu\]"):
        open_session(model, "cuda")
    assert runtime.loads == []


@pytest.mark.parametrize(
    "runtime",
    [FakeRuntime(CUDA, actual=CPU), FakeRuntime(CUDA, fails={CUDA: runtime_error("EPFail")}), FakeRuntime()],
    ids=["replaced by the CPU", "fails to load", "not listed"],
)
def test_auto_without_a_working_cuda_is_a_cpu_session_with_a_warning(use, model: Path, caplog, runtime) -> None:
    use(runtime)
    opened = open_session(model, "auto")
    assert caplog.text.count("running on the CPU, because CUDA cannot be used: --device cuda") == len(runtime.loads) - 1
    assert opened.circumstances.provider == CPU
    assert opened.circumstances.to_json()["provider"] == CPU
    assert str(opened.circumstances).startswith(f"{CPU}, fp32 (prelunet ")
    assert runtime.loads[-1][1] == [CPU], "the session should have been loaded anew, for the CPU alone"
    assert opened.run(canvas(), sizes()).windows == CPU


@pytest.mark.parametrize(
    ("net", "flags", "installed", "precision", "device"),
    [
        ("A", "avx2 avx512f", "onnxruntime openvino", None, "openvino"),
        ("A", "avx2 avx512f", "onnxruntime openvino", "fp32", "openvino"),
        ("A", "avx2 avx512f", "onnxruntime", None, "cpu"),
        ("A", "avx2", "onnxruntime openvino", None, "cpu"),
        ("demo", "avx2 avx512f", "onnxruntime openvino", None, "cpu"),
        ("demo", "avx2", "openvino", None, "openvino"),
        ("demo", "avx2", "onnxruntime", "bf16", "openvino"),  # which then names what is missing
        (None, "avx2 avx512f", "onnxruntime openvino", None, "cpu"),  # not a model file of ours, or damaged
    ],
)
def test_on_a_cpu_auto_follows_the_net_the_processor_and_what_is_installed(  # noqa: PLR0917
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    net: str | None,
    flags: str,
    installed: str,
    precision: Precision | None,
    device: Device,
) -> None:
    metadata = {} if net is None else replace(build_contract(net), checkpoint_sha256="0" * 64).to_metadata()
    monkeypatch.setattr(load, "read_metadata", lambda _path: metadata)
    monkeypatch.setattr(load, "has_processor_flags", lambda *wanted: not set(wanted).isdisjoint(flags.split()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed.split() else None)
    assert choose_cpu_device(model, precision) == device


def canvas() -> np.ndarray:
    return np.zeros((1, 30, 41, 3), np.uint8)


def sizes() -> np.ndarray:
    return np.array([[30, 41]])


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_where_cuda_works_it_runs_with_our_options(use, model: Path, device: Device) -> None:
    runtime = use(FakeRuntime(CUDA))
    opened = open_session(model, device, threads=7)
    assert opened.circumstances.provider == CUDA
    ((options, ((provider, settings),)),) = runtime.loads
    assert provider == CUDA
    assert settings["cudnn_conv_algo_search"] == "HEURISTIC"
    assert settings["use_tf32"] == "0"
    assert all(isinstance(value, str) for value in settings.values()), "the runtime takes text only"
    assert options.entries == {"session.disable_cpu_ep_fallback": "1"}
    assert (options.intra_op_num_threads, options.enable_mem_pattern) == (1, False)
    assert runtime.disabled_optimizers == ["ConvAddFusion"], "biases stay in nodes of their own"
    assert runtime.events[-2:] == ["preload_dlls", f"load on {CUDA}"]
    assert settings["gpu_mem_limit"] == str(10 * GIB), "no more than is free"
    assert FakeBinding.staged == [(1, 28, 28, 3)]
    assert opened.circumstances.versions["gpu"] == "Card 0"


def test_for_many_images_the_largest_batch_is_run_once_after_the_smallest(use, model: Path) -> None:
    use(FakeRuntime(CUDA))
    open_with_placement(model, Placement("cuda"), preallocate=True)
    smallest, largest = FakeBinding.staged
    assert smallest == (1, 28, 28, 3)
    assert largest[0] > 1
    assert largest[1:] == (60, 60, 3), "of the largest scale"


@pytest.mark.parametrize("requested", [None, 3 * GIB, 40 * GIB])
def test_a_limit_of_the_gpu_and_what_is_free_there_bound_the_arena_and_its_batches(
    use, model: Path, monkeypatch: pytest.MonkeyPatch, requested: int | None
) -> None:
    for free in (2 * GIB, 10 * GIB):
        monkeypatch.setattr(FakeCudaRuntime, "arena_bytes", lambda _, most, free=free: min(most or 2**60, free))
        runtime = use(FakeRuntime(CUDA))
        opened = open_with_placement(model, Placement("cuda", memory=2**20, gpu_memory=requested))
        arena = min(requested or 2**60, free)
        ((_, ((_, settings),)),) = runtime.loads
        assert settings["gpu_mem_limit"] == str(arena)
        assert opened.rules == gpu_rules(fake_contract(), arena, file_bytes=9)


@pytest.mark.parametrize(
    ("free", "sessions"), [(2 * GIB, 1), (10 * GIB, 3), (100 * GIB, 4)], ids=["room for one", "for three", "for all"]
)
def test_a_gpu_prepares_as_many_shapes_as_are_asked_for_and_find_room_each_with_an_equal_part_of_the_arena(
    use, model: Path, monkeypatch: pytest.MonkeyPatch, free: int, sessions: int
) -> None:
    monkeypatch.setattr(FakeCudaRuntime, "arena_bytes", lambda *_: free)
    runtime = use(FakeRuntime(CUDA))
    opened = open_with_placement(model, Placement("cuda", prepared_shapes=4))
    assert opened.prepared_shapes == len(runtime.loads) == sessions
    assert {settings["gpu_mem_limit"] for _, ((_, settings),) in runtime.loads} == {str(free // sessions)}
    assert opened.rules == gpu_rules(fake_contract(), free // sessions, file_bytes=9)


@pytest.mark.parametrize("many", [False, True])
def test_what_does_not_run_on_the_gpu_is_an_error_there_and_runs_on_the_cpu_where_any_device_will_do(
    use, model: Path, caplog: pytest.LogCaptureFixture, many: bool
) -> None:
    def computes(shape: tuple[int, ...]) -> tuple[None, None, None]:
        if shape[0] > 1 or not many:
            raise runtime_error("NotImplemented", "cuDNN is unavailable")
        return nothing(shape)

    runtime = use(FakeRuntime(CUDA))
    FakeBinding.computes = staticmethod(computes)
    with pytest.raises(EnvironmentFault, match=r"model\.onnx loads but does not run on CUDA.*cuDNN is unavailable"):
        open_with_placement(model, Placement("cuda"), preallocate=many)
    opened = open_with_placement(model, Placement("auto"), preallocate=many)
    assert opened.circumstances.provider == CPU
    assert opened.placement.device == "cpu"
    assert "running on the CPU, because CUDA cannot be used: model model.onnx loads but does not run" in caplog.text
    assert runtime.events.count(f"load on {CUDA}") == 2
    assert runtime.events.count(f"load on {CPU}") == 1


def golden_contract(**changes: Any) -> ModelContract:
    """Return a contract with the golden answers of a linear function of the pixels."""
    scores, logits = golden_answer()
    return fake_contract(golden=(GoldenImage(30, 41, tuple(scores), tuple(logits)),), **changes)


def golden_answer() -> tuple[np.ndarray, np.ndarray]:
    logits = np.array([-8.0, 0.5, 4.0, -1.0, 2.0, 3.5]) * (1 + golden_image(30, 41).mean() / 255)
    powers = np.exp(logits)
    return powers / powers.sum(), logits


@pytest.mark.parametrize(
    ("off", "too_far_for"),
    [
        ((0, 0), ""),
        ((5.8e-5, 0), ""),  # a twentieth of the logits' tolerance, times the largest logit: 12
        ((6.2e-5, 0), "fp32"),
        ((0, 9e-5), ""),
        ((0, 1.2e-4), "fp32"),
        ((9e-3, 9e-3), "fp32"),
        ((1.2e-2, 0), "fp32 tf32"),
        ((np.nan, 0), "fp32 tf32"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_a_gpu_whose_golden_scores_are_further_off_than_its_precision_allows_is_refused(
    use, model: Path, precision: Precision, off: tuple[float, float], too_far_for: str, caplog
) -> None:
    def computes(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
        scores, logits = golden_answer()
        one = np.zeros((shape[0], 6))
        one[0, 1] = 1
        return scores + off[0] * one, logits + off[1] * abs(logits).max() * one, [(1, 4)]

    use(FakeRuntime(CUDA, contract=golden_contract(canvas="exact")))
    FakeBinding.computes = staticmethod(computes)
    placement = Placement("cuda", precision)
    if precision in too_far_for:
        allowed = {"fp32": "5.9e-05 and 0.0001", "tf32": "0.01 and 0.01"}[precision]
        found = f"in {precision} on {CUDA} the scores of the golden image of 30x41 are off by {off[0]:.1e} "
        with pytest.raises(
            EnvironmentFault, match=rf"{re.escape(found)}.* {allowed} are allowed\. If `prelunet verify"
        ):
            open_with_placement(model, placement)
        open_with_placement(model, placement, check=False)
        if precision == "fp32":
            assert open_with_placement(model, Placement("auto")).circumstances.provider == CPU
            assert "may round to tf32: use --precision tf32" in caplog.text
        return
    open_with_placement(model, placement)
    np.testing.assert_array_equal(FakeBinding.images, golden_image(30, 41)[None])


def test_a_file_without_golden_images_is_opened_with_the_warning_that_its_scores_are_not_checked(
    use, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use(FakeRuntime(CUDA))
    open_session(model, "cuda")
    assert caplog.text.count(f"model.onnx carries no golden images, so its scores on {CUDA} are not checked") == 1
    open_session(model, "cpu")
    assert caplog.text.count("golden images") == 1


def test_the_runtime_with_which_files_are_written_does_not_have_to_prove_itself_again(use, model: Path) -> None:
    runtime = use(FakeRuntime(contract=golden_contract()))
    open_with_placement(model, Placement("cpu"), preallocate=True)
    assert runtime.events == [f"load on {CPU}", "run"]


@pytest.mark.parametrize(
    ("file", "precision", "tensor_cores"), [("fp32", None, "0"), ("fp32", "tf32", "1"), ("fp16", None, "1")]
)
def test_tensor_cores_are_used_where_float32_is_not_promised(
    use, tmp_path: Path, file: Any, precision: Precision | None, tensor_cores: str
) -> None:
    contract = fake_contract(precision=file)
    path = tmp_path / "model.onnx"
    written = onnx.ModelProto()
    onnx.helper.set_model_props(written, contract.to_metadata())
    path.write_bytes(written.SerializeToString())
    runtime = use(FakeRuntime(CUDA, contract=contract))
    open_session(path, "cuda", precision=precision)
    ((_, ((_, settings),)),) = runtime.loads
    assert settings["use_tf32"] == tensor_cores


def test_a_limit_of_the_gpus_memory_is_refused_where_the_model_runs_on_a_cpu(use, model: Path) -> None:
    runtime = use(FakeRuntime())
    for device in ("cpu", "openvino", "auto"):
        with pytest.raises(UsageError, match=r"--gpu-memory-limit: the model runs on a CPU .*--memory-limit"):
            open_with_placement(model, Placement(device, gpu_memory=GIB))
    assert runtime.loads == []


@pytest.mark.parametrize(
    ("device", "option"), [("cpu", " --memory-limit of validate and bench"), ("cuda", " --gpu-memory-limit of")]
)
def test_a_batch_without_memory_is_the_machines_fault_and_names_the_limit_that_would_help(
    use, model: Path, device: Device, option: str
) -> None:
    def fails(*_: Any) -> None:
        raise runtime_error("Fail", "CUDA failure 2: out of memory")

    runtime = use(FakeRuntime(CUDA))
    opened = open_session(model, device)
    runtime.on_run = FakeBinding.computes = staticmethod(fails)
    with pytest.raises(EnvironmentFault, match=rf"too little memory for a batch \(CUDA failure 2.*{option}"):
        opened.run(canvas(), sizes())


@pytest.mark.parametrize(
    "text",
    [
        "std::bad_alloc",
        "Exception from src/cpu_memory.cpp:257: Failed to allocate 77070336 bytes of memory",
        "Exception from plugin.cpp:54: can't alloc",
        "Resource temporarily unavailable",
        "Failed to allocate memory for requested buffer of size 5",
        "Available memory of 5 is smaller than requested bytes of 12",
        "CUDA failure 2: out of memory ; GPU=0",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED",
    ],
)
def test_every_out_of_memory_message_of_the_runtimes_is_recognized(text: str) -> None:
    assert is_out_of_memory(RuntimeError(f"[E] {text}"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("an illegal memory access was encountered"))


@pytest.mark.parametrize("threads", [0, 3])
def test_threads_are_those_of_the_cpu_provider(use, model: Path, threads: int) -> None:
    runtime = use(FakeRuntime(CUDA))
    opened = open_session(model, "cpu", threads=threads)
    assert opened.circumstances.provider == CPU
    ((options, providers),) = runtime.loads
    assert (options.intra_op_num_threads, providers) == (threads, [CPU])
    assert runtime.events == [f"load on {CPU}"], "no library of CUDA should be touched"


def test_a_served_model_has_the_threads_that_were_requested_for_one_batch_or_one_for_each_lane(
    use, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "cores", lambda: 4)
    runtime = use(FakeRuntime())
    opened = load_model(ModelFile("x", model), Placement("cpu", threads=3))
    assert (opened.circumstances.provider, opened.lanes) == (CPU, 3)
    assert runtime.events == [f"load on {CPU}", "run", f"load on {CPU}"], "it should have run once first"
    assert [options.intra_op_num_threads for options, _ in runtime.loads] == [3, 1]


@pytest.mark.parametrize(
    ("placement", "file_bytes"),
    [
        (Placement("cpu", threads=1), 9),
        (Placement("cpu", threads=3, memory=2**30), 2**25 + 1),
        (Placement("cpu", threads=3), MAX_LANES_BYTES + 1),
    ],
    ids=["one thread", "a large part of the memory limit", "a large file"],
)
def test_without_room_or_threads_for_lanes_a_served_model_is_loaded_once(
    use, model: Path, placement: Placement, file_bytes: int
) -> None:
    os.truncate(model, file_bytes)  # a file with holes
    runtime = use(FakeRuntime())
    assert load_model(ModelFile("x", model), placement).lanes == 1
    assert len(runtime.loads) == 1


@pytest.mark.parametrize(("number", "memory"), [(4, None), (16, None), (64, None), (16, 2**33)])
def test_on_every_machine_a_servers_lanes_can_all_compute_a_view_of_the_usual_size(
    exported, monkeypatch: pytest.MonkeyPatch, number: int, memory: int | None
) -> None:
    monkeypatch.setattr(load, "cores", lambda: number)
    session = load_model(ModelFile("x", exported["demo-image"].path), Placement("cpu", memory=memory))
    windows = math.prod(session.contract.window_grid(64, 85))
    assert session.rules.max_rows(64 * 85, windows) >= session.lanes == number


def test_lanes_compute_at_the_same_time_what_all_threads_compute(exported) -> None:
    net = exported["demo-image"]
    session = load_model(ModelFile("x", net.path), Placement("cpu", threads=2))
    canvases = np.random.default_rng(5).integers(0, 256, (2, 3, 41, 57, 3), dtype=np.uint8)
    sizes = np.array([(41, 57)] * 3)
    with ThreadPoolExecutor(2) as pool:
        in_lanes = list(pool.map(lambda each: session.run(each, sizes, in_lane=True), canvases))
    for each, outputs in zip(canvases, in_lanes, strict=True):
        # Threads divide the outputs of a layer, not its sums, but their number may choose another kernel.
        np.testing.assert_allclose(outputs.scores, session.run(each, sizes).scores, rtol=0, atol=1e-6)


def test_a_session_hands_the_canvas_to_the_runtime_and_knows_its_file_and_versions(use, model: Path) -> None:
    use(FakeRuntime())
    opened = open_session(model, "cpu")
    outputs = opened.run(canvas(), sizes())
    assert outputs.scores == OUTPUTS
    np.testing.assert_array_equal(outputs.logits["images"], canvas())
    np.testing.assert_array_equal(outputs.logits["sizes"], sizes())
    assert opened.model_sha256 == hashlib.sha256(b"any bytes").hexdigest()
    assert opened.contract == fake_contract()
    assert "9.8.7" in opened.circumstances.versions.values()
    assert {"prelunet", "numpy", "pillow", "python"} < set(opened.circumstances.versions)


def test_a_misspelt_device_is_refused_with_the_list_of_them(use, model: Path) -> None:
    runtime = use(FakeRuntime(CUDA))
    with pytest.raises(UsageError, match=r"no device 'gpu'\. There are: auto, cpu, openvino, ncnn, cuda"):
        open_session(model, "gpu")
    assert runtime.loads == []


@pytest.mark.parametrize(
    "names",
    [
        {"inputs": ("pixels", "sizes")},
        {"inputs": ("sizes", "images")},
        {"outputs": ("scores",)},
        {"outputs": ("scores", "logits", "windows", "features")},
    ],
    ids=lambda names: str(*names.values()),
)
def test_a_file_with_other_inputs_or_outputs_is_refused_naming_them_and_ours(use, model: Path, names: dict) -> None:
    use(FakeRuntime(**names))
    with pytest.raises(ContractError) as refused:
        open_session(model, "cpu")
    found = {"inputs": INPUTS, "outputs": OUTPUTS, **names}
    assert f"inputs {found['inputs']} and outputs {found['outputs']}" in str(refused.value)
    assert f"the contract has {INPUTS} and {OUTPUTS}" in str(refused.value)
    assert f"prelunet export CHECKPOINT -o {model}" in str(refused.value)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("kind", ["InvalidProtobuf", "InvalidGraph", "NoModel", "InvalidArgument", "NotImplemented"])
def test_a_file_that_no_device_could_load_is_the_files_fault_on_every_device(
    use, model: Path, kind: str, device: Device
) -> None:
    error = runtime_error(kind, "it \n" + "x" * 1000 + " is the cause\n")
    runtime = use(FakeRuntime(CUDA, fails={CPU: error, CUDA: error}))
    with pytest.raises(
        ContractError, match=r"model\.onnx: not an ONNX model.*\(it x+ … x{200,300} is the cause\)\. Write one with"
    ):
        open_session(model, device)
    assert len(runtime.loads) == 1, "another device would not help"


@pytest.mark.parametrize(
    "error", [MemoryError(), runtime_error("RuntimeException", "std::bad_alloc")], ids=["own", "C++"]
)
def test_a_machine_with_too_little_memory_is_not_the_files_fault(use, model: Path, error: Exception) -> None:
    use(FakeRuntime(fails={CPU: error}))
    with pytest.raises(EnvironmentFault, match="too little memory left to load it"):
        open_session(model, "cpu")


def test_a_gpu_with_too_little_memory_for_the_weights_is_the_machines_fault_which_auto_survives(
    use, model: Path
) -> None:
    full = runtime_error("Fail", "Available memory of 0 is smaller than requested bytes of 2048")
    use(FakeRuntime(CUDA, fails={CUDA: full}))
    with pytest.raises(EnvironmentFault, match=r"could not be loaded on the GPU: too little memory .*requested bytes"):
        open_session(model, "cuda")
    assert open_session(model, "auto").circumstances.provider == CPU


def test_a_file_with_other_classes_than_its_graph_is_refused(use, model: Path) -> None:
    use(FakeRuntime(classes=7))
    with pytest.raises(ContractError, match="6 classes are listed, but the graph has 7"):
        open_session(model, "cpu")


@pytest.mark.parametrize("kind", ["Fail", "EPFail", "RuntimeException", "EngineError"])
def test_what_only_the_gpu_cannot_load_is_the_machines_fault_there_and_the_files_on_a_cpu(
    use, model: Path, kind: str
) -> None:
    error = runtime_error(kind)
    use(FakeRuntime(CUDA, fails={CPU: error, CUDA: error}))
    with pytest.raises(EnvironmentFault, match=r"--device cuda: .*model\.onnx could not be loaded on the GPU"):
        open_session(model, "cuda")
    with pytest.raises(ContractError, match=rf"model\.onnx: could not be loaded \({kind}: a message of the runtime\)"):
        open_session(model, "cpu")


def test_a_missing_file_is_refused_before_anything_is_loaded(use, tmp_path: Path) -> None:
    runtime = use(FakeRuntime(CUDA))
    with pytest.raises(UsageError, match=r"none\.onnx: cannot be read \(No such file"):
        open_session(tmp_path / "none.onnx", "auto")
    assert runtime.loads == []


@pytest.mark.parametrize("sides", [(28, 28), (28, "W"), ("H", 30), (30, 30)])
def test_a_graph_of_one_size_serves_no_model_that_says_it_takes_others(
    use, model: Path, sides: tuple[str | int, str | int]
) -> None:
    use(FakeRuntime(sides=sides))  # the contract's crop is 28, and its canvases may be larger
    with pytest.raises(ContractError, match=r"its graph takes images of .*states a crop of 28 .*prelunet adopt"):
        open_session(model, "cpu")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "[E] : 1 : Load from m.onnx failed:/ort_src/core/graph/model.cc:256 ns::Model::Model(onnx::P&&, const "
            "ns::L<std::function<void(int)>>*) const Unsupported IR version: 99, max: 13\n",
            "[E] : 1 : Load from m.onnx failed: Unsupported IR version: 99, max: 13",
        ),
        (
            "Status Message: /src/op.h:91 int ns::f(int) [with T = float] sizes (3) and (4) differ",
            "Status Message: sizes (3) and (4) differ",
        ),
        ("[E] : utils.cc:1461 SizeOf Out of bounds (1 > 0)", "[E] : Out of bounds (1 > 0)"),
        ("No Op registered for Frob(1) in net.onnx", "No Op registered for Frob(1) in net.onnx"),
        ("", "RuntimeError"),
    ],
)
def test_the_runtimes_words_are_shown_without_the_place_in_its_source(text: str, shown: str) -> None:
    assert error_summary(RuntimeError(text)) == shown


def test_threads_that_share_a_session_compute_one_at_a_time() -> None:
    """Each batch waits in vain for a second concurrent one."""
    meeting = threading.Barrier(2, timeout=0.3)
    met: list[object] = []

    class CrowdedModel:
        prepared_shapes = 1

        def compute(self, staged: object) -> tuple[object, ...]:
            with suppress(threading.BrokenBarrierError):
                met.append(meeting.wait())
            meeting.reset()
            return staged, None, None, nothing

    circumstances = Circumstances("CPUExecutionProvider", "fp32", {})
    loaded: Any = CrowdedModel()
    session = Session(loaded, fake_contract(), "", circumstances, Placement("cpu"), rules=BatchRules())
    with ThreadPoolExecutor(2) as pool:
        assert [outputs.scores for outputs in pool.map(session.compute, "ab")] == ["a", "b"]
    assert met == []
