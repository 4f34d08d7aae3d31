"""The processes of a run and their communication. Only this module imports torch.distributed.

torchrun starts the processes and passes each its rank in environment variables. Without them there is one process, and
the methods here cost nothing.

When a process dies: on CPUs (gloo) the others see a closed connection within seconds and raise EnvironmentFault. On
GPUs (NCCL) a step blocks inside the GPU, where nothing can be raised: torchrun stops the other processes, or without
torchrun NCCL's watchdog does after `TIMEOUT` (TORCH_NCCL_ASYNC_ERROR_HANDLING, on unless set to 0). Communication
between CPUs (`total`, `any`, `wait`) uses gloo there too, and raises.
"""

import gc
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...evaluator.errors import EnvironmentFault, UsageError
from ...evaluator.machine import supports_bf16

Value = TypeVar("Value")

TIMEOUT = timedelta(hours=2)  # for what only the first process does (statistics of all images), and slow machines
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run, as seen by one of them.

    rank: of this process, in [0, size); device: of this process; local_processes: number of processes on this machine.
    The methods are collective: every process must call them in the same order (`exchange`: every process involved).
    Each raises EnvironmentFault if another process has died. `all_reduce` and `exchange` need several processes.
    """

    rank: int
    size: int
    device: torch.device
    local_processes: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """Return the sum of each value over all processes, in float64."""
        if self.size == 1:
            return [float(value) for value in values]
        sums = torch.tensor(values, dtype=torch.float64)
        self.all_reduce(sums).wait()
        return [float(value) for value in sums]

    def any(self, flag: bool) -> bool:
        return self.total(float(flag))[0] > 0

    def all_gather(self, value: Value) -> list[Value]:
        """Return the values of all processes in the order of ranks; for small plain data."""
        if self.size == 1:
            return [value]
        values: list[Value] = [value] * self.size
        with self.translated_errors():
            dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        self.total(0.0)

    def all_reduce(self, tensor: Tensor) -> "Pending":
        """Start replacing a tensor by its sum over all processes."""
        with self.translated_errors():
            work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return Pending(self, (work,))

    def exchange(self, sending: Sequence[tuple[Tensor, int]], receiving: Sequence[tuple[Tensor, int]]) -> "Pending":
        """Start sending tensors to processes and receiving tensors from them; empty tensors are skipped.

        Each item is (contiguous tensor, rank). Two processes must list their common transfers in the same order.
        """
        operations = [dist.P2POp(dist.isend, tensor, rank) for tensor, rank in sending if tensor.numel()]
        operations += [dist.P2POp(dist.irecv, tensor, rank) for tensor, rank in receiving if tensor.numel()]
        if not operations:
            return Pending(self)
        with self.translated_errors():
            return Pending(self, tuple(dist.batch_isend_irecv(operations)))

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Translate communication errors to EnvironmentFault."""
        try:
            yield
        except RuntimeError as error:  # the closest common base of the errors of gloo, NCCL and torch's store
            raise EnvironmentFault(
                f"a process of this run has died or is unreachable (detected by rank {self.rank} of {self.size}; "
                "torchrun names the one that failed first). The last saved state is kept: run the same command again. "
                f"Error: {_first_sentence(error)}"
            ) from error


@dataclass(frozen=True)
class Pending:
    """Asynchronous communication; its tensors must not be used until `wait` returns."""

    group: ProcessGroup
    works: tuple[dist.Work, ...] = ()

    def wait(self) -> None:
        """Wait until it is complete; on a GPU, until later computations are ordered after it."""
        with self.group.translated_errors():
            for work in self.works:
                work.wait()


@contextmanager
def open_process_group(device: str | None = None) -> Iterator[ProcessGroup]:
    """Join the other processes of this run; without torchrun's environment variables there are none.

    device: "cpu", "cuda" (each process uses the GPU of its local rank), or None for CUDA if available.
    Raises UsageError for an unknown device or an incomplete environment; EnvironmentFault if there is no such GPU or
    the processes cannot connect.
    """
    rank, size, local_rank, local_processes = _read_environment(os.environ)
    group = ProcessGroup(rank, size, _device(device, local_rank), local_processes)
    if size == 1:
        yield group
        return
    on_gpu = group.device.type == "cuda"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT, device_id=group.device if on_gpu else None
        )
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise EnvironmentFault(
            f"rank {rank} of {size} could not connect to the others at {address}: {_first_sentence(error)}. Start all "
            "of them with the same torchrun command, at an address that every machine can reach"
        ) from error
    try:
        yield group
        group.wait()  # before any process closes its connections
    finally:
        gc.collect()  # pending work that outlives gloo would end the process with std::terminate
        dist.destroy_process_group()


def _read_environment(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Return rank, number of processes, and both among the processes of this machine, from torchrun's variables."""
    present = [name for name in _TORCHRUN_VARIABLES if environment.get(name)]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return 0, 1, 0, 1
    if len(present) < len(_TORCHRUN_VARIABLES):
        missing = ", ".join(name for name in _TORCHRUN_VARIABLES if name not in present)
        raise UsageError(
            f"the environment has {', '.join(present)}, but not {missing}. Start the processes with torchrun, which "
            "sets all of them, or unset them to train in one process"
        )
    try:
        rank, size, local_rank = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        local_processes = int(environment.get("LOCAL_WORLD_SIZE") or 1)
        if not 0 <= rank < size:  # the others would wait for it
            raise ValueError(f"RANK is {rank} and WORLD_SIZE {size}")
    except ValueError as error:
        raise UsageError(
            f"the environment has wrong variables of torchrun: {error}. Start the processes with torchrun, or unset "
            f"{', '.join(_TORCHRUN_VARIABLES)} to train in one process"
        ) from error
    return rank, size, local_rank, local_processes


def _device(name: str | None, local_rank: int) -> torch.device:
    """Return the device of this process."""
    if name not in {None, "cpu", "cuda"}:
        raise UsageError(f"unknown device '{name}'. Choose one of cpu, cuda")
    if name == "cpu" or (name is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            "cuda was requested, but torch finds no GPU. Check nvidia-smi, or train with --device cpu"
        )
    if local_rank >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"process {local_rank} (counted from 0) has no GPU: this machine has only "
            f"{torch.cuda.device_count()}. Start at most one process per GPU: torchrun --nproc-per-node"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def device_supports_bf16(device: torch.device) -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else supports_bf16()


def device_supports_tf32(device: torch.device) -> bool:
    """Return whether a device has instructions for TF32: a GPU of NVIDIA's Ampere generation or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _first_sentence(error: BaseException) -> str:
    """Return the first sentence of a backend's error, without the source location."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\] ", "", first).split(". ")[0]
