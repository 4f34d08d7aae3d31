"""Worker processes that make arrays ahead of their reader, in order, by torch's DataLoader.

The processes are forked: they start at once, share what the reader has in memory, and need no code of it imported anew.
What they run may use numpy and Pillow, but neither torch's threads nor CUDA, which a fork leaves behind. They ignore
Ctrl-C and SIGTERM, which are for the reader to hear. They end within a second when it is gone, however it ended, and
within three when it stops reading or comes to its end, even if they wait for a disk that does not answer.
"""

import atexit
import mmap
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from prelunet.evaluator.arrays import UInt8Array
from prelunet.evaluator.errors import EnvironmentFault, PreluNetError, from_os_error

Item = TypeVar("Item")
Rest = TypeVar("Rest")

PREFETCH_FACTOR = 2  # items that each process has finished or in work
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where torch passes tensors between processes
_POLL_SECONDS = 0.5  # seconds between two looks for the reader
_GRACE_SECONDS = (
    2.0  # seconds to end in order: a worker that ends inside a lock of torch's queues would leave it locked
)


def map_in_processes(
    function: Callable[[Item], tuple[UInt8Array, Rest]],
    items: Iterable[Item],
    workers: int,
    size: int,
    *,
    pin_memory: bool = False,
    local_processes: int = 1,
) -> Iterator[tuple[UInt8Array, Rest]]:
    """Yield function(item) in the order of the items, which are pickled, as are the results beside the array.

    size: bytes of an array at most; pin_memory: whether arrays lie in memory from which a GPU copies by itself. Arrays pass
    through shared memory, or through pipes, which takes longer, where there is too little of it for the readers of one
    training on this machine, of which there are `local_processes`.
    An error of ours is raised as it is; EnvironmentFault when a process has died.
    """
    work = _MappedDataset(
        function, shared=_free_shared_memory() // local_processes >= (workers * PREFETCH_FACTOR + 2) * size
    )
    leave = mmap.mmap(-1, 1)  # one byte, which reader and workers share: not 0 when these are to end
    results = _start_workers(work, items, workers, leave, pin_memory=pin_memory)
    dismiss = partial(leave.__setitem__, 0, 1)
    atexit.register(dismiss)  # runs before multiprocessing's own, which waits for the workers without limit
    try:
        while True:
            try:
                result = next(results, None)
            except RuntimeError as error:
                if str(error).startswith("DataLoader worker (pid"):
                    raise _worker_died_error(workers) from error
                raise
            if result is None:
                return
            if isinstance(result, PreluNetError):
                raise result
            array, rest = result
            yield (array.numpy() if isinstance(array, torch.Tensor) else array), rest
    finally:
        atexit.unregister(dismiss)
        dismiss()  # torch, which comes next, asks them too, but none that is stuck hears it


def _start_workers(
    work: "_MappedDataset", items: Iterable[Any], workers: int, leave: mmap.mmap, *, pin_memory: bool
) -> Iterator[Any]:
    """Start the processes."""
    # torch's handler of SIGCHLD would raise wherever the reader is, even while it saves its state.
    with warnings.catch_warnings(), _preserved_handler(signal.SIGCHLD):
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores, if that is asked for
        loader = DataLoader(
            work,
            batch_size=None,
            sampler=items,
            num_workers=workers,
            collate_fn=_identity,
            pin_memory=pin_memory,
            prefetch_factor=PREFETCH_FACTOR,
            multiprocessing_context="fork",
            worker_init_fn=partial(_init_worker, os.getpid(), leave),
            generator=torch.Generator(),  # or it would draw from the one of all others
        )
        return iter(loader)


class _MappedDataset(Dataset[Any]):
    """Calls the function in a worker process. shared: whether arrays go through shared memory."""

    def __init__(self, function: Callable[[Any], tuple[UInt8Array, Any]], *, shared: bool) -> None:
        self._function, self._shared = function, shared

    def __getitem__(self, item: Any) -> Any:
        try:
            array, rest = self._function(item)
        except PreluNetError as error:
            return error  # raised here, it would arrive with the worker's traceback for its text
        except OSError as error:
            return from_os_error(error)
        return (torch.from_numpy(array) if self._shared else array), rest


def _identity(result: Any) -> Any:
    return result


def _init_worker(reader: int, leave: mmap.mmap, _worker: int) -> None:
    """Prepare a worker process: deaf to what is meant for its reader, and gone when that is gone or says so.

    torch's own watch waits for the worker's results to be taken, which nobody will do.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == reader and not leave[0]:
            time.sleep(_POLL_SECONDS)
        if leave[0]:
            time.sleep(_GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _preserved_handler(number: int) -> Iterator[None]:
    """Undo what the block does to the handler of a signal."""
    before = signal.getsignal(number)
    yield
    if threading.current_thread() is threading.main_thread():  # elsewhere nothing can have changed it
        signal.signal(number, before)


def _free_shared_memory() -> int:
    """Return the bytes that are free, 0 where there is none at all."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return 0


def _worker_died_error(workers: int) -> EnvironmentFault:
    return EnvironmentFault(
        f"one of {workers} processes that decode images has died. The system ends processes when memory runs out, or "
        f"when {SHARED_MEMORY}, through which they pass images, is full. Use fewer of them with --workers, or give "
        "more of either (in Docker: --shm-size 2g); the same command goes on from the last saved state"
    )
