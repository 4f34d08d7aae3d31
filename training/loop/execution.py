"""How a training run is executed. Imports no torch, so that `prelunet train --help` does not either."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...evaluator.cli_option import option
from ...evaluator.errors import UsageError


@dataclass(frozen=True)
class Execution:
    """How a run is executed; none of this affects what is learned, except through the order of sums.

    So a run may resume with other values. A checkpoint's provenance states device, deterministic and cudnn_benchmark.
    events: whether to write TensorBoard events.
    Raises UsageError for values that contradict each other.
    """

    HELP_GROUP: ClassVar[str] = "Execution"
    device: str | None = option(None, "cpu or cuda.", default="cuda if available", metavar="DEVICE")
    parallel: Literal["ddp", "hybrid"] | None = option(
        None,
        "How several processes (torchrun) share the work: ddp, or hybrid, the paper's scheme, with the fc layers "
        "in one process.",
        default="ddp",
    )
    workers: int | None = option(
        None,
        "Decoding workers per training process; 0 decodes in the process itself.",
        min=0,
        default="number of cores - 1, divided among the processes of a machine, at most 16 for each",
    )
    diagnose: bool = option(False, "Measure the layers at every evaluation, for prelunet inspect RUN.")
    deterministic: bool = option(
        False,
        "Use only algorithms that repeat a run bit for bit on the same device with the same versions; slower on a "
        "GPU. A CPU repeats a run anyway, with the same number of threads.",
    )
    cudnn_benchmark: bool = option(
        False, "Let cuDNN time its algorithms for convolutions on the GPU and use the fastest."
    )
    events: bool = False

    def __post_init__(self) -> None:
        if self.deterministic and self.cudnn_benchmark:
            raise UsageError(
                "--deterministic and --cudnn-benchmark exclude each other: timings choose another algorithm in each "
                "process. Omit one of them"
            )
