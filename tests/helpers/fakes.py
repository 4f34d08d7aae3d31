"""A model without a runtime: the interface of `Session` over arithmetic simple enough for a test to repeat."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.architectures import architecture
from prelunet.evaluator.contract import ClassEntry, ModelContract, default_scales
from prelunet.evaluator.datasets.dataset import Dataset, Reader
from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.memory import gpu_rules
from prelunet.evaluator.engine.session import Circumstances, Outputs, Placement, check_canvas
from prelunet.evaluator.protocols import EvaluationProtocol
from prelunet.evaluator.validation.run import Run, build_run_info, describe_dataset
from prelunet.evaluator.validation.validate import validate


def fake_contract(classes: int = 6, **changes: Any) -> ModelContract:
    """Return a contract with the trunk of `demo`: crop 28, stride 4, windows of 7x7 cells."""
    demo = architecture("demo")
    contract = ModelContract(
        architecture=demo,
        classes=tuple(ClassEntry(f"n{index:08}", f"class {index}") for index in range(classes)),
        mean_kind="channel",
        trunk=demo.layers,
        window=demo.window,
        spp_levels=demo.spp_levels,
        crop=demo.crop,
        default_scales=default_scales(demo.crop),
        max_side=1024,
        canvas="ragged",
        precision="fp32",
        checkpoint_sha256="c" * 64,
    )
    return replace(contract, **changes)


class FakeSession:
    """A linear model: the logits of a window are its crop of pixels times a fixed matrix.

    Each pixel of the crop has its own random weights, so that another position, scale, mirroring or padding gives
    other scores. Keeps the shapes of its calls in `calls`; in `runs`, as they began, whether each was in a
    lane, and its rows.
    """

    def __init__(
        self,
        contract: ModelContract | None = None,
        *,
        provider: str = "CPUExecutionProvider",
        seed: int = 0,
        rules: BatchRules | None = None,
    ):
        self.contract = contract or fake_contract()
        self.model_sha256 = hashlib.sha256(f"fake {seed}".encode()).hexdigest()
        self.circumstances = Circumstances(provider, "fp32", {"fake": "1"})
        on_gpu = provider == "CUDAExecutionProvider"
        self.rules = rules or (gpu_rules(self.contract, None) if on_gpu else BatchRules())
        self.placement = Placement("cuda" if on_gpu else "cpu", threads=1)
        self.model_bytes = 0
        self.lanes = self.prepared_shapes = 1
        self.calls: list[tuple[int, ...]] = []
        self.runs: list[tuple[bool, int]] = []
        self._weights = np.random.default_rng(seed).normal(
            0, 0.1 / self.contract.crop, (len(self.contract.classes), self.contract.crop, self.contract.crop, 3)
        )

    def window_logits(self, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
        """Return the logits of every window of one image, float64 (rows, columns, classes)."""
        crop, stride = self.contract.crop, self.contract.trunk_stride
        rows, columns = self.contract.window_grid(*image.shape[:2])
        crops = np.lib.stride_tricks.sliding_window_view(image.astype(np.float64) - 100, (crop, crop), (0, 1))
        crops = crops[::stride, ::stride][:rows, :columns]
        return np.einsum("ijcyx,kyxc->ijk", crops, self._weights, optimize=True)

    def run(self, images: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64], *, in_lane: bool = False) -> Outputs:
        assert not in_lane or self.lanes > 1, "no lanes were added"
        self.runs.append((in_lane, len(images)))
        return self.compute(self.stage(images, sizes))

    def stage(self, images: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> Any:
        check_canvas(self.contract, images, sizes)
        return images, sizes

    def compute(self, staged: Any) -> Outputs:
        images, sizes = staged
        self.calls.append(images.shape)
        grid = self.contract.window_grid(*images.shape[1:3])
        scores, logits, windows = [], [], []
        window_scores = np.zeros((len(images), *grid, len(self.contract.classes)), np.float32)
        for index, (height, width) in enumerate(sizes):
            of_windows = self.window_logits(images[index, :height, :width])
            rows, columns = of_windows.shape[:2]
            powers = np.exp(of_windows)
            softmax = powers / powers.sum(axis=-1, keepdims=True)
            window_scores[index, :rows, :columns] = softmax
            scores.append(softmax.mean(axis=(0, 1)))
            logits.append(of_windows.mean(axis=(0, 1)))
            windows.append((rows, columns))
        return Outputs(
            np.array(scores, np.float32),
            np.array(logits, np.float32),
            np.array(windows, np.int64),
            lambda: window_scores,
        )


def validated(
    session: Any, dataset: Dataset, protocol: EvaluationProtocol, folder: Path, *, file: str = "m.onnx", **options: Any
) -> Run:
    """Validate as `prelunet validate` does; file: last component of the model's path."""
    info = build_run_info(session, file, describe_dataset(dataset), protocol)
    return validate([session], dataset, info, folder, **options)


class _Copies:
    """Reads `3/n01/a.png` as `n01/a.png`."""

    def __init__(self, reader: Reader):
        self._reader = reader

    def read(self, file: str) -> bytes:
        return self._reader.read(file.partition("/")[2])


def repeated(dataset: Dataset, times: int) -> Dataset:
    """Return a dataset that has each image several times (fewer than ten), under names in ascending order."""
    samples = [replace(sample, file=f"{copy}/{sample.file}") for copy in range(times) for sample in dataset.samples]
    return replace(dataset, samples=samples, reader=_Copies(dataset.reader))
