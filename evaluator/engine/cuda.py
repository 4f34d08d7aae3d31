"""How models run on CUDA: the provider's options, and batches that are uploaded while others are computed.

The reasons of each option, with measurements of others, are in docs/gpu.md.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from evaluator.contract import INPUTS, OUTPUTS


def cuda_options(gpu: int = 0, *, tf32: bool = False, memory: int | None = None) -> dict[str, str]:
    """Return the options of the CUDA provider; it takes text only.

    gpu: which one, from 0; memory: most bytes of its arena, besides what cuDNN and the driver take.
    """
    options = {
        "device_id": str(gpu),
        # The other searches rebuild every convolution's plan for 100-300 ms at each change of shape.
        "cudnn_conv_algo_search": "HEURISTIC",
        "prefer_nhwc": "1",  # the layout of the tensor cores
        "fuse_conv_bias": "1",  # in NHWC only
        "use_tf32": str(int(tf32)),
        "arena_extend_strategy": "kNextPowerOfTwo",  # exact regions would never be merged, and shapes vary
    }
    return options if memory is None else {**options, "gpu_mem_limit": str(memory)}


class CudaBinding:
    """Inputs and outputs of a session that live on the GPU.

    A batch is uploaded by `stage` in one thread while `compute` runs another in the thread that owns the session. Of
    the outputs only the small ones come back; window scores, 2 MB a view, stay there until somebody asks for them.
    """

    def __init__(self, runtime: ModuleType, session: Any, gpu: int):
        self._runtime = runtime
        self._session = session
        self._gpu = gpu

    def stage(self, images: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> list[Any]:
        """Upload a batch; returns when it is on the GPU."""
        return [self._runtime.OrtValue.ortvalue_from_numpy(array, "cuda", self._gpu) for array in (images, sizes)]

    def compute(self, staged: Sequence[Any]) -> list[Any]:
        """Run an uploaded batch; see `LoadedModel.compute`."""
        binding = self._session.io_binding()
        for name, value in zip(INPUTS, staged, strict=True):
            binding.bind_ortvalue_input(name, value)
        for name in OUTPUTS:
            binding.bind_output(name, "cuda", self._gpu)
        self._session.run_with_iobinding(binding)
        *small, window_scores = binding.get_outputs()
        return [*(value.numpy() for value in small), window_scores.numpy]
