"""A session is on the device that was asked for or it is an error; a runtime that only records stands in for the real.

What the real runtime answers for damaged files and wrong canvases is in test_export.py.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conftest import Exported
from evaluator.contract import INPUTS, OUTPUTS
from evaluator.engine import onnx_runtime
from evaluator.engine.runtime import reason_of
from evaluator.engine.session import Device, Placement, open_session
from evaluator.errors import ContractError, EnvironmentFault, UsageError
from evaluator.serving.models import ModelFile, load_models
from fakes import fake_contract

CPU, CUDA, OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"


class SessionOptions:
    """Holds what it is told, like the real one."""

    def __init__(self) -> None:
        self.intra_op_num_threads = -1  # nobody's default, so that a value that is seen was set by us
        self.enable_mem_pattern = True
        self.entries: dict[str, str] = {}

    def add_session_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


class FakeRuntime(ModuleType):
    """The face of onnxruntime. offers: the providers it lists; comes_up: what really runs where CUDA was asked for.

    fails: provider → error of its loading. Keeps what it is handed: `loads`, (options, providers) of each load, and
    `events`, the order of the calls.
    """

    __version__ = "9.8.7"
    SessionOptions = SessionOptions

    def __init__(
        self,
        *offers: str,
        comes_up: str = CUDA,
        fails: dict[str, Exception] | None = None,
        inputs: tuple[str, ...] = INPUTS,
        outputs: tuple[str, ...] = OUTPUTS,
        classes: int = 6,
        sides: tuple[str | int, str | int] = ("H", "W"),
    ) -> None:
        super().__init__("onnxruntime")
        self._offers = [*offers, CPU]
        self._comes_up = comes_up
        self._fails = fails or {}
        self._names = inputs, outputs
        self._classes = classes
        self._sides = sides
        self.loads: list[tuple[SessionOptions, list[Any]]] = []
        self.events: list[str] = []

    def get_available_providers(self) -> list[str]:
        return self._offers

    def preload_dlls(self) -> None:
        self.events.append("preload_dlls")

    def set_default_logger_severity(self, severity: int) -> None:
        assert severity == 4

    def InferenceSession(  # noqa: N802
        self, path: str, options: SessionOptions, *, providers: list[Any], enable_fallback: int
    ) -> Any:
        assert enable_fallback == 0, "the runtime would try the CPU and print"
        self.loads.append((options, providers))
        asked = providers[0] if isinstance(providers[0], str) else providers[0][0]
        self.events.append(f"load on {asked}")
        if asked in self._fails:
            raise self._fails[asked]
        runs = self._comes_up if asked == CUDA else asked
        inputs, outputs = (
            [SimpleNamespace(name=name, shape=["N", *shape]) for name in names]
            for names, shape in zip(self._names, ((*self._sides, 3), (self._classes,)), strict=True)
        )
        return SimpleNamespace(
            get_providers=lambda: [runs] if runs == CPU else [runs, CPU],
            get_modelmeta=lambda: SimpleNamespace(custom_metadata_map=fake_contract().to_metadata()),
            get_inputs=lambda: inputs,
            get_outputs=lambda: outputs,
            run=lambda names, feeds: [names, feeds, runs, None],
        )


class BindingOfNothing:
    """Where uploads would go; keeps what was uploaded in `staged`."""

    staged: list[tuple[int, ...]] = []  # noqa: RUF012 - emptied by `use`

    def __init__(self, _runtime: Any, _session: Any, gpu: int, classes: int):
        assert (gpu, classes) == (0, 6)

    def stage(self, images: np.ndarray, _sizes: np.ndarray) -> None:
        self.staged.append(images.shape)

    def compute(self, _staged: None) -> list[Any]:
        return [None] * 4


def runtime_error(kind: str, text: str = "what the runtime says") -> Exception:
    """Make an error of a class that is called like one of the runtime's."""
    return type(kind, (Exception,), {})(text)


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
        monkeypatch.setattr(onnx_runtime, "CudaBinding", BindingOfNothing)
        BindingOfNothing.staged.clear()
        return runtime

    return put


@pytest.mark.parametrize("instead", [CPU, OPENVINO])
def test_asked_for_cuda_another_provider_is_an_error_that_names_both_and_never_a_session(
    use, model: Path, instead: str
) -> None:
    runtime = use(FakeRuntime(CUDA, comes_up=instead))
    with pytest.raises(EnvironmentFault, match=rf"--device cuda: {CUDA} did not come up.* offers {instead} instead"):
        open_session(model, "cuda")
    assert runtime.events == ["preload_dlls", f"load on {CUDA}"], "the CPU should not be tried"


def test_asked_for_cuda_a_driver_that_fails_is_an_error_with_the_runtimes_words(use, model: Path) -> None:
    use(FakeRuntime(CUDA, fails={CUDA: runtime_error("EPFail", "CUDA driver\nversion is insufficient")}))
    with pytest.raises(EnvironmentFault, match=r"--device cuda: .*model\.onnx .*CUDA driver version is insufficient"):
        open_session(model, "cuda")


def test_asked_for_cuda_a_runtime_that_knows_none_is_an_error_that_names_the_extra(use, model: Path) -> None:
    runtime = use(FakeRuntime())
    with pytest.raises(EnvironmentFault, match=r"--device cuda: .*knows no CUDA.*\[gpu\]"):
        open_session(model, "cuda")
    assert runtime.loads == []


@pytest.mark.parametrize(
    "runtime",
    [FakeRuntime(CUDA, comes_up=CPU), FakeRuntime(CUDA, fails={CUDA: runtime_error("EPFail")}), FakeRuntime()],
    ids=["replaced by the CPU", "fails to load", "not listed"],
)
def test_auto_without_a_cuda_that_comes_up_is_a_cpu_session_that_says_so(use, model: Path, caplog, runtime) -> None:
    use(runtime)
    opened = open_session(model, "auto")
    assert (
        caplog.text.count("running on the CPU, because CUDA did not come up: --device cuda") == len(runtime.loads) - 1
    )
    assert opened.circumstances.provider == CPU
    assert opened.circumstances.to_json()["provider"] == CPU
    assert str(opened.circumstances).startswith(f"{CPU}, fp32 (prelunet ")
    assert runtime.loads[-1][1] == [CPU], "the session should have been loaded anew, for the CPU alone"
    assert opened.run(canvas(), sizes()).windows == CPU


def canvas() -> np.ndarray:
    return np.zeros((1, 30, 41, 3), np.uint8)


def sizes() -> np.ndarray:
    return np.array([[30, 41]])


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_where_cuda_comes_up_it_runs_with_our_options(use, model: Path, device: Device) -> None:
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
    assert runtime.events == ["preload_dlls", f"load on {CUDA}"]
    largest, smallest = BindingOfNothing.staged
    assert smallest == (1, 28, 28, 3)
    assert largest[0] > 1, "a GPU's memory should be taken by a large batch first"
    assert largest[1:] == (60, 60, 3), "of the largest scale"


@pytest.mark.parametrize("threads", [0, 3])
def test_threads_are_those_of_the_cpu_provider(use, model: Path, threads: int) -> None:
    runtime = use(FakeRuntime(CUDA))
    opened = open_session(model, "cpu", threads=threads)
    assert opened.circumstances.provider == CPU
    ((options, providers),) = runtime.loads
    assert (options.intra_op_num_threads, providers) == (threads, [CPU])
    assert runtime.events == [f"load on {CPU}"], "no library of CUDA should be touched"


def test_a_served_model_has_the_threads_that_were_asked_for(use, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(FakeRuntime())
    ((file, opened),) = load_models([ModelFile("x", model)], Placement("cpu", threads=3))
    assert (file.name, opened.circumstances.provider) == ("x", CPU)
    assert runtime.loads[0][0].intra_op_num_threads == 3


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
    with pytest.raises(UsageError, match=r"no device 'gpu'\. There are: auto, cpu, openvino, cuda"):
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
    with pytest.raises(ContractError, match=rf"model\.onnx: could not be loaded \({kind}: what the runtime says\)"):
        open_session(model, "cpu")


def test_a_file_that_is_not_there_is_told_before_anything_is_loaded(use, tmp_path: Path) -> None:
    runtime = use(FakeRuntime(CUDA))
    with pytest.raises(UsageError, match=r"none\.onnx: cannot be read \(No such file"):
        open_session(tmp_path / "none.onnx", "auto")
    assert runtime.loads == []


# The import of the runtime itself


def install(folder: Path, name: str) -> None:
    """Lay down the part of an installed distribution by which Python knows it."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


@pytest.mark.parametrize("other", ["onnxruntime-gpu", "onnxruntime-openvino"])
def test_two_distributions_of_the_runtime_are_refused_naming_both(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    for name in ("onnxruntime", other):
        install(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentFault, match=rf"onnxruntime and .*{other} are both installed.*pip uninstall"):
        open_session(model, "cpu")


def test_a_runtime_that_two_distributions_overwrote_is_said_to_be_damaged(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))
    with pytest.raises(EnvironmentFault, match=r"onnxruntime is damaged.*all of onnxruntime, onnxruntime-gpu"):
        open_session(model, "cpu")


def test_a_missing_runtime_is_told_with_the_extras_that_bring_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # which makes its import fail
    with pytest.raises(EnvironmentFault, match=r"onnxruntime cannot be imported .*\[cpu\]"):
        open_session(model, "cpu")


def test_the_runtime_leaves_nothing_in_the_users_home(exported: dict[str, Exported], tmp_path: Path) -> None:
    """onnxruntime 1.31 keeps a device id and a store of events there, to upload them, unless it is told not to."""
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    code = (
        "from pathlib import Path; from evaluator.engine.session import open_session; "
        f"open_session(Path({str(exported['demo-channel'].path)!r}), 'cpu')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**environment, "HOME": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


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
    assert reason_of(RuntimeError(text)) == shown
