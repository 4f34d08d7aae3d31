"""The environment of a run: torch's settings during training, and what a checkpoint records of it."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...evaluator.engine.load import package_versions
from ...evaluator.errors import UsageError
from ...evaluator.machine import cpuinfo_value
from ..distributed.process_group import ProcessGroup
from ..recipe import TrainingPrecision
from .execution import Execution

_WORKSPACES = (":4096:8", ":16:8")  # of cuBLAS, with which its results repeat, according to NVIDIA


@contextmanager
def torch_settings(precision: TrainingPrecision, execution: Execution) -> Iterator[None]:
    """Apply a run's settings to torch, and restore the earlier ones at the end of the block.

    Enter it before CUDA is used: cuBLAS reads its environment variable once, which therefore is not restored. Raises
    UsageError if that variable has a value with which results do not repeat.
    """
    if execution.deterministic:
        workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
        if workspace not in _WORKSPACES:
            raise UsageError(
                f"CUBLAS_WORKSPACE_CONFIG={workspace} in the environment contradicts --deterministic. Unset it, or set "
                f"it to {' or '.join(_WORKSPACES)}"
            )
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32
    mode = torch.get_deterministic_debug_mode()  # 0 is off, 1 warns only
    try:
        if execution.deterministic:  # not otherwise, as the call imports torch's compiler, which takes seconds
            torch.use_deterministic_algorithms(True)
        cudnn.benchmark = execution.cudnn_benchmark
        cudnn.allow_tf32 = products.allow_tf32 = precision == "tf32"  # for convolutions torch allows it by default
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32 = before
        if execution.deterministic:
            torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


def current_environment(group: ProcessGroup, precision: TrainingPrecision) -> dict[str, Any]:
    """Return what the bits of a net depend on besides its recipe, images and `--parallel`, for `provenance`.

    device and threads are those of this process.
    """
    on_gpu = group.device.type == "cuda"
    cudnn = {"cudnn": str(torch.backends.cudnn.version())} if on_gpu else {}  # type: ignore[no-untyped-call]
    cpu = cpuinfo_value("model name") or platform.machine()
    return {
        "versions": dict(sorted(package_versions({"torch": str(torch.__version__), **cudnn}).items())),
        "device": torch.cuda.get_device_name(group.device) if on_gpu else cpu,
        "processes": group.size,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }
