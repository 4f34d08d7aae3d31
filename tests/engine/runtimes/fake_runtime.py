"""Fakes of onnxruntime, its CUDA provider and a GPU: they record calls, and answer as a test prescribes."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from prelunet.evaluator.contract import INPUTS, OUTPUTS, ModelContract
from tests.helpers.fakes import fake_contract

CPU, CUDA, OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"


class SessionOptions:
    """Stores the options it receives, like the real one."""

    def __init__(self) -> None:
        self.intra_op_num_threads = -1  # not a real default, so any other value was set by us
        self.enable_mem_pattern = True
        self.entries: dict[str, str] = {}

    def add_session_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


class FakeRuntime(ModuleType):
    """The interface of onnxruntime. offers: the providers it lists; actual: what really runs when CUDA is requested.

    fails: provider → error of its loading; on_run: called at the start of every run. Records `loads`, (options,
    providers) of each load, and `events`, the order of the calls.
    """

    __version__ = "9.8.7"
    SessionOptions = SessionOptions

    def __init__(
        self,
        *offers: str,
        actual: str = CUDA,
        fails: dict[str, Exception] | None = None,
        inputs: tuple[str, ...] = INPUTS,
        outputs: tuple[str, ...] = OUTPUTS,
        classes: int = 6,
        sides: tuple[str | int, str | int] = ("H", "W"),
        contract: ModelContract | None = None,
    ) -> None:
        super().__init__("onnxruntime")
        self._offers = [*offers, CPU]
        self._actual = actual
        self._fails = fails or {}
        self._names = inputs, outputs
        self._classes = classes
        self._sides = sides
        self._contract = contract or fake_contract()
        self.loads: list[tuple[SessionOptions, list[Any]]] = []
        self.disabled_optimizers: list[str] | None = None  # of the last load
        self.events: list[str] = []
        self.on_run: Callable[[], object] = lambda: None

    def get_available_providers(self) -> list[str]:
        return self._offers

    def _run(self, provider: str) -> Any:
        def run(names: Any, feeds: Any) -> list[Any]:
            self.events.append("run")
            self.on_run()
            return [names, feeds, provider, None]

        return run

    def preload_dlls(self) -> None:
        self.events.append("preload_dlls")

    def set_default_logger_severity(self, severity: int) -> None:
        assert severity == 4

    def InferenceSession(  # noqa: N802
        self,
        path: str,
        options: SessionOptions,
        *,
        providers: list[Any],
        enable_fallback: int,
        disabled_optimizers: list[str] | None,
    ) -> Any:
        assert enable_fallback == 0, "the runtime would try the CPU and print"
        self.loads.append((options, providers))
        self.disabled_optimizers = disabled_optimizers
        requested = providers[0] if isinstance(providers[0], str) else providers[0][0]
        self.events.append(f"load on {requested}")
        if requested in self._fails:
            raise self._fails[requested]
        runs = self._actual if requested == CUDA else requested
        inputs, outputs = (
            [SimpleNamespace(name=name, shape=["N", *shape]) for name in names]
            for names, shape in zip(self._names, ((*self._sides, 3), (self._classes,)), strict=True)
        )
        return SimpleNamespace(
            get_providers=lambda: [runs] if runs == CPU else [runs, CPU],
            get_modelmeta=lambda: SimpleNamespace(custom_metadata_map=self._contract.to_metadata()),
            get_inputs=lambda: inputs,
            get_outputs=lambda: outputs,
            run=self._run(runs),
        )


GIB = 2**30


class FakeCudaRuntime:
    """Stands in for libcudart: a GPU with 10 GiB free for the arena."""

    def __init__(self, _runtime: Any, gpu: int):
        self.gpu = gpu

    def name(self) -> str:
        return f"Card {self.gpu}"

    def arena_bytes(self, limit: int | None) -> int:
        return min(limit or 2**60, 10 * GIB)


class FakeBinding:
    """Stands in for uploads.

    Records the shapes of uploaded batches in `staged`, and the images of the last one in `images`; `computes` maps
    their shape to scores, logits and windows, or raises an error.
    """

    staged: list[tuple[int, ...]] = []  # noqa: RUF012 - emptied by `use`
    images: Any = None
    computes: Any = None

    def __init__(self, _runtime: Any, _sessions: Any, card: FakeCudaRuntime, classes: int):
        assert isinstance(card, FakeCudaRuntime)
        assert classes == 6

    def stage(self, images: np.ndarray, _sizes: np.ndarray) -> tuple[int, ...]:
        self.staged.append(images.shape)
        FakeBinding.images = images
        return images.shape

    def compute(self, staged: tuple[int, ...]) -> list[Any]:
        return [*FakeBinding.computes(staged), None]


def nothing(_shape: tuple[int, ...]) -> tuple[None, None, None]:
    return None, None, None


def runtime_error(kind: str, text: str = "a message of the runtime") -> Exception:
    """Create an error whose class is named like one of the runtime's."""
    return type(kind, (Exception,), {})(text)
