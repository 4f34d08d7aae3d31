"""The processes that train together, and what they say to each other. Only this module imports torch.distributed.

torchrun starts the processes and tells each its place by environment variables; without them there is one process, and
nothing here costs anything.

When a process dies: on CPUs (gloo) the others meet a closed connection within seconds and raise EnvironmentFault. On
GPUs (NCCL) a step waits inside the GPU, where nothing can be raised: torchrun ends the other processes, and without
torchrun NCCL's watchdog does after `TIMEOUT` (TORCH_NCCL_ASYNC_ERROR_HANDLING, which is on unless it is set to 0).
What goes between CPUs (`total`, `any`, `wait`) uses gloo there too, and raises.
"""

import gc
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from prelunet.evaluator.errors import EnvironmentFault, UsageError
from prelunet.evaluator.machine import supports_bf16

Value = TypeVar("Value")

TIMEOUT = timedelta(hours=2)  # for what the first process does alone (looking at all images), and a silent machine
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of one training, seen from one of them.

    rank: of this process, in [0, size); device: where this process computes; here: how many of them are on this
    machine; sent: bytes that this process has sent so far, by purpose. The methods are collective: every process must
    call them, in the same order (`exchange`: those that are named). Each raises EnvironmentFault where another process
    has died.
    """

    rank: int
    size: int
    device: torch.device
    local_processes: int = 1
    bytes_sent: Counter[str] = field(default_factory=Counter)

    @property
    def is_first(self) -> bool:
        """Return whether this process is the one that writes files and talks to the user."""
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """Return the sum of each value over all processes, in float64."""
        if self.size == 1:
            return [float(value) for value in values]
        sums = torch.tensor(values, dtype=torch.float64)
        self.all_reduce(sums, "control").wait()
        return [float(value) for value in sums]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return self.total(float(flag))[0] > 0

    def all_gather(self, value: Value) -> list[Value]:
        """Return what each process has given, in the order of ranks; small plain data."""
        if self.size == 1:
            return [value]
        values: list[Value] = [value] * self.size
        with self.translated_errors():
            dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Return when every process has come here."""
        self.total(0.0)

    def all_reduce(self, tensor: Tensor, purpose: str) -> "Pending":
        """Begin to replace a tensor by its sum over all processes.

        A ring sends each byte of the sum round twice, but for this process's own part: 2·(size−1)/size of the tensor.
        """
        if self.size == 1:
            return Pending(self)
        self.bytes_sent[purpose] += 2 * (self.size - 1) * tensor.nbytes // self.size
        with self.translated_errors():
            work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return Pending(self, (work,))

    def exchange(
        self, sending: Sequence[tuple[Tensor, int]], receiving: Sequence[tuple[Tensor, int]], purpose: str
    ) -> "Pending":
        """Begin to send tensors to processes, and to fill tensors with what processes send; empty ones are left out.

        Each is (contiguous tensor, rank). Two processes that have several for each other name them in the same order.
        """
        sending = [(tensor, rank) for tensor, rank in sending if tensor.numel()]
        receiving = [(tensor, rank) for tensor, rank in receiving if tensor.numel()]
        self.bytes_sent[purpose] += sum(tensor.nbytes for tensor, _ in sending)
        operations = [dist.P2POp(dist.isend, tensor, rank) for tensor, rank in sending]
        operations += [dist.P2POp(dist.irecv, tensor, rank) for tensor, rank in receiving]
        if not operations:
            return Pending(self)
        with self.translated_errors():
            return Pending(self, tuple(dist.batch_isend_irecv(operations)))

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Say what to do when the communication fails."""
        try:
            yield
        except RuntimeError as error:  # gloo, NCCL and torch's store have no closer base in common
            raise EnvironmentFault(
                f"a process of this training has died or cannot be reached any more (noticed by rank {self.rank} of "
                f"{self.size}; torchrun names the one that failed first). The last saved state is kept: start the same "
                f"command again. What was noticed: {_first_sentence(error)}"
            ) from error


@dataclass(frozen=True)
class Pending:
    """Communication that goes on while the process does something else; its tensors are not to be touched meanwhile."""

    group: ProcessGroup
    works: tuple[dist.Work, ...] = ()

    def wait(self) -> None:
        """Return when it is done: on a GPU, when what is computed from now on will see its result."""
        with self.group.translated_errors():
            for work in self.works:
                work.wait()


@contextmanager
def open_process_group(device: str | None = None) -> Iterator[ProcessGroup]:
    """Join the other processes of this training; alone without torchrun's variables in the environment.

    device: "cpu", "cuda" (each process of a machine takes the GPU of its local rank), or None for CUDA where there is
    any. Raises UsageError for another device and for a half-set environment; EnvironmentFault for a GPU that is not
    there, and when the processes do not find each other.
    """
    place = _read_environment(os.environ)
    rank, size = place.rank, place.size
    group = ProcessGroup(rank, size, _device(device, place.local_rank), place.local_processes)
    if size == 1:
        yield group
        return
    _join(group)
    try:
        yield group
        group.wait()  # before any of them closes the connections
    finally:
        gc.collect()  # work that still holds a connection when gloo goes would end the process with std::terminate
        dist.destroy_process_group()


def _join(group: ProcessGroup) -> None:
    on_gpu = group.device.type == "cuda"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            timeout=TIMEOUT,
            device_id=group.device if on_gpu else None,
        )
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise EnvironmentFault(
            f"rank {group.rank} of {group.size} did not reach the others at {address}: {_first_sentence(error)}. Start all "
            "of them with the same torchrun command, at an address that every machine can reach"
        ) from error


class _TorchrunEnvironment(NamedTuple):
    """What torchrun says of a process. local_rank, here: its number among, and the count of, those of its machine."""

    rank: int
    size: int
    local_rank: int
    local_processes: int


def _read_environment(environment: Mapping[str, str]) -> _TorchrunEnvironment:
    given = [name for name in _TORCHRUN_VARIABLES if environment.get(name)]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return _TorchrunEnvironment(0, 1, 0, 1)
    if len(given) < len(_TORCHRUN_VARIABLES):
        missing = ", ".join(name for name in _TORCHRUN_VARIABLES if name not in given)
        raise UsageError(
            f"the environment has {', '.join(given)}, but not {missing}: start the processes with torchrun, which sets "
            "all of them, or unset them to train in one process"
        )
    try:
        rank, size, local_rank = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        local_processes, port = int(environment.get("LOCAL_WORLD_SIZE") or 1), int(environment["MASTER_PORT"])
    except ValueError as error:
        names = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_PORT"
        raise UsageError(f"{names} in the environment should be numbers: {error}") from error
    if not (0 <= rank < size and local_rank >= 0 and 1 <= local_processes <= size):
        raise UsageError(
            f"RANK {rank}, WORLD_SIZE {size}, LOCAL_RANK {local_rank} and LOCAL_WORLD_SIZE {local_processes} in the environment "
            "do not fit"
        )
    if not 1 <= port <= 65535:
        raise UsageError(f"MASTER_PORT {port} in the environment should be a port, 1 to 65535")
    return _TorchrunEnvironment(rank, size, local_rank, local_processes)


def _device(name: str | None, local_rank: int) -> torch.device:
    """Return the device of this process."""
    if name not in {None, "cpu", "cuda"}:
        raise UsageError(f"no device '{name}' to train on. There are: cpu, cuda")
    if name == "cpu" or (name is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            "cuda was asked for, but torch finds no GPU here: look at nvidia-smi, or train with --device cpu"
        )
    if local_rank >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"process {local_rank} (counted from 0) of this machine has no GPU: there are {torch.cuda.device_count()}. "
            "Start no more processes than GPUs: torchrun --nproc-per-node"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False  # on unless told, and then fp32 would have the 10 bits of TF32
    return device


def device_supports_bf16(device: torch.device) -> bool:
    """Say whether a device has instructions for bfloat16."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else supports_bf16()


def _first_sentence(error: BaseException) -> str:
    """Return the first sentence of a backend's error, without the place in its source."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\] ", "", first).split(". ")[0]
