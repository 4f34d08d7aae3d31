"""The interface of a model file loaded in a runtime, and the classification of runtime errors."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ...arrays import Int64Array, UInt8Array
from ...contract import rewrite_hint
from ...errors import ContractError, EnvironmentFault

Precision = Literal["fp32", "tf32", "bf16", "fp16", "int8"]

_MAX_SUMMARY, _SUMMARY_HEAD = 400, 120  # characters of a runtime's error text; its end names the cause
# Out-of-memory messages: on the host, on a GPU within the arena's limit, and in CUDA and its libraries.
_OUT_OF_MEMORY = (
    "bad_alloc",
    "allocate memory",
    "can't alloc",
    "Resource temporarily unavailable",  # for threads that need a stack
    "smaller than requested",
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# Messages of a lost CUDA context: every later call of this process fails with the same message.
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
_CUDA_700 = re.compile(r"\(7\d\d: ")  # the same, as `evaluator.engine.runtimes.cuda` writes it
_FAILED_TO_ALLOCATE = re.compile(r"[Ff]ailed to allocate \d+ bytes")
# `/path/file.cc:91 type name(arguments) const`, with at most one level of nested parentheses.
_SOURCE_PLACE = re.compile(
    r"[\w./+-]*\.(?:cc|h|cpp|hpp|cu|cuh):\d+ "
    r"(?:[\w:<>,&*~ ]*::[\w<>~]+(?:\(\))?\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])?|\w+)"
)


class LoadedModel(Protocol):
    """A model file loaded in a runtime.

    provider: the runtime's name for what runs it; metadata: of the file; inputs, outputs: names;
    image_shape, scores_shape: of the first input and output, numbers where the graph fixes a length;
    packages: name → version of everything that can change a score; prepared_shapes: number of shapes, those of the last
    batches, that it computes again without preparing anything.
    """

    provider: str
    metadata: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    image_shape: Sequence[Any]
    scores_shape: Sequence[Any]
    packages: Mapping[str, str]
    prepared_shapes: int

    def stage(self, images: UInt8Array, sizes: Int64Array) -> Any:
        """Copy a batch to the device. Any thread may call this, also while another batch is computed."""
        ...

    def compute(self, staged: Any) -> Sequence[Any]:
        """Run a staged batch; return scores, logits, windows, and a function that fetches the window scores."""
        ...


@dataclass(frozen=True)
class Runtime:
    """A way to compute model files, and what the engine has to know about it.

    provider: the runtime's name for it, in run.json; load: loads a file, given its path and by name precision, threads,
    masks, gpu, gpu_memory and prepared_shapes, and also returns the bytes that the arena of a GPU may take; precisions:
    of a file → in which it can be computed, the default first.
    loading_copies, weight_copies, batch_copies: copies in main memory of the weights while a file is loaded, of the
    weights afterwards, and of a batch: measured, see benchmarks/README.md.
    distribution: the package that it needs, also the name of its extra, None for onnxruntime; benefit: of that package,
    completes the sentence "it is ...".
    gpu: whether it computes on a GPU; ragged: whether images may be smaller than their canvas; switch_seconds: time to
    prepare a batch of another shape than the last one, and flops: operations/s by precision while it computes small
    nets. These two are constants, so that equal commands plan equal batches everywhere.
    """

    provider: str
    load: Callable[..., tuple[LoadedModel, int | None]]
    precisions: Mapping[str, tuple[Precision, ...]]
    loading_copies: float
    weight_copies: float
    batch_copies: int
    distribution: str | None = None
    benefit: str = ""
    gpu: bool = False
    ragged: bool = True
    switch_seconds: float = 0.0
    flops: Mapping[str, float] = field(default_factory=dict)


def error_summary(error: Exception) -> str:
    """Return a runtime's error text on one line, without source locations; a long text keeps its end."""
    text = " ".join(_SOURCE_PLACE.sub(" ", " ".join(str(error).split())).split())
    if len(text) > _MAX_SUMMARY:
        text = f"{text[:_SUMMARY_HEAD]} … {text[_SUMMARY_HEAD - _MAX_SUMMARY :]}"
    return text or type(error).__name__


def load_error(error: Exception, path: Path, *, faulty: bool) -> ContractError | EnvironmentFault:
    """Return the error for a failed load. faulty: the runtime reports that the file is not a valid model."""
    text = error_summary(error)
    if is_out_of_memory(error):
        return EnvironmentFault(f"{path}: too little memory left to load it ({text}). Stop other programs")
    if faulty:
        return ContractError(
            f"{path}: not an ONNX model that can be loaded ({text}). "
            "Write one with: prelunet export CHECKPOINT -o FILE (for classifiers from elsewhere: prelunet adopt)"
        )
    fix = f"{rewrite_hint(str(path))}, or try another --device"
    return ContractError(f"{path}: could not be loaded ({type(error).__name__}: {text}). {fix}")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a runtime failed for lack of memory."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or any(words in text for words in _OUT_OF_MEMORY)
        or _FAILED_TO_ALLOCATE.search(text) is not None
    )


def is_device_lost(error: Exception | str) -> bool:
    """Return whether an error, or its text, means that the device only returns errors to this process from now on."""
    text = str(error)
    return any(words in text for words in _DEVICE_LOST) or _CUDA_700.search(text) is not None
