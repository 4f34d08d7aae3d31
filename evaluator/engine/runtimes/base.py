"""What the runtimes have in common: the interface of a loaded file, and how their errors are told."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.contract import rewrite_hint
from prelunet.evaluator.errors import ContractError, EnvironmentFault

Array = npt.NDArray[Any]

_MAX_SUMMARY, _SUMMARY_HEAD = 400, 120  # characters of what the runtime says; the cause stands at its end
# How runtimes say that memory lacks: on the host, on a GPU within the arena's limit, and in CUDA and its libraries.
_OUT_OF_MEMORY = (
    "bad_alloc",
    "allocate memory",
    "can't alloc",
    "Resource temporarily unavailable",  # of threads that would need a stack
    "smaller than requested",
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# How CUDA says that its context is gone: every later call of this process fails with the same words.
_DEVICE_LOST = (
    "illegal memory access",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "device-side assert",
    "uncorrectable ECC error",
    "hardware stack error",
    "GPU is lost",
    "CUDA failure 7",  # 700 to 799: 700 illegal address, 719 launch failure, …
)
_CUDA_700 = re.compile(r"\(7\d\d: ")  # the same, as `evaluator.engine.runtimes.cuda` tells it
_FAILED_TO_ALLOCATE = re.compile(r"[Ff]ailed to allocate \d+ bytes")
# `/path/file.cc:91 type name(arguments) const`, where parentheses may stand inside of parentheses.
_SOURCE_PLACE = re.compile(
    r"[\w./+-]*\.(?:cc|h|cpp|hpp|cu|cuh):\d+ "
    r"(?:[\w:<>,&*~ ]*::[\w<>~]+(?:\(\))?\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])?|\w+)"
)


class LoadedModel(Protocol):
    """A model file in a runtime.

    provider: what runs it; metadata: of the file;
    inputs, outputs: names; image_shape, scores_shape: of the first of each, numbers where the graph fixes a length;
    packages: name → version of what can change a score.
    """

    provider: str
    metadata: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    image_shape: Sequence[Any]
    scores_shape: Sequence[Any]
    packages: Mapping[str, str]

    def stage(self, images: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> Any:
        """Bring a batch to the device; any thread may, also while another batch is computed."""
        ...

    def compute(self, staged: Any) -> Sequence[Any]:
        """Run a staged batch: scores, logits, windows, and what gives the window scores when it is called."""
        ...


def error_summary(error: Exception) -> str:
    """Return the runtime's words for a failure in one line, without the place in its own source; the end is kept."""
    text = " ".join(_SOURCE_PLACE.sub(" ", " ".join(str(error).split())).split())
    if len(text) > _MAX_SUMMARY:
        text = f"{text[:_SUMMARY_HEAD]} … {text[_SUMMARY_HEAD - _MAX_SUMMARY :]}"
    return text or type(error).__name__


def load_error(error: Exception, path: Path, *, faulty: bool) -> ContractError | EnvironmentFault:
    """Say whose fault a failed load is; faulty: the runtime says that the file is no good model."""
    text = error_summary(error)
    if is_out_of_memory(error):
        return EnvironmentFault(f"{path}: this machine has too little memory left to load it ({text})")
    if faulty:
        return ContractError(
            f"{path}: not an ONNX model that can be loaded ({text}). "
            "Write one with: prelunet export CHECKPOINT -o FILE (from a classifier of another origin: prelunet adopt)"
        )
    return ContractError(f"{path}: could not be loaded ({type(error).__name__}: {text}). {rewrite_hint(str(path))}")


def is_out_of_memory(error: Exception) -> bool:
    """Say whether a failure is for want of memory."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or any(words in text for words in _OUT_OF_MEMORY)
        or _FAILED_TO_ALLOCATE.search(text) is not None
    )


def is_device_lost(error: Exception | str) -> bool:
    """Say whether a failure, or its text, means that the device gives this process only errors from now on."""
    text = str(error)
    return any(words in text for words in _DEVICE_LOST) or _CUDA_700.search(text) is not None
