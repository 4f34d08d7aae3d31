"""Worker processes that compute arrays ahead of their consumer, in order, with torch's DataLoader.

The processes are forked: they start immediately, share the consumer's memory, and import nothing again. Their code may
use numpy and Pillow, but neither torch's threads nor CUDA, which do not survive a fork. They ignore Ctrl-C and SIGTERM,
which the consumer handles. They exit within a second after the consumer dies, and within three after it stops reading
or finishes, even if they are blocked on an unresponsive disk.
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
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from ...evaluator.arrays import UInt8Array
from ...evaluator.errors import EnvironmentFault, PreluNetError, from_os_error

Item = TypeVar("Item")
Rest = TypeVar("Rest")

PREFETCH_FACTOR = 2  # items per process that are finished or in progress
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where torch passes tensors between processes
_POLL_SECONDS = 0.5  # between checks that the consumer is alive
_GRACE_SECONDS = 2.0  # for an orderly exit, in which a worker releases the locks of torch's queues


def map_in_processes(
    function: Callable[[Item], tuple[UInt8Array, Rest]],
    items: Iterable[Item],
    workers: int,
    size: int,
    *,
    pin_memory: bool = False,
    local_processes: int = 1,
) -> Iterator[tuple[UInt8Array, Rest]]:
    """Yield function(item) in the order of the items. Items are pickled, and so is the second element of a result.

    size: maximum bytes of an array; pin_memory: whether arrays are in page-locked memory; local_processes: consumers of
    this run on this machine. Arrays pass through shared memory if there is enough for all consumers, else through
    pipes, which are slower. A PreluNetError of a worker is raised unchanged; EnvironmentFault if a worker has died.
    """
    work = _MappedDataset(
        function, shared=free_shared_memory() // local_processes >= (workers * PREFETCH_FACTOR + 2) * size
    )
    stop_flag = mmap.mmap(-1, 1)  # one byte shared with the workers; they exit when it is not 0
    results = _start_workers(work, items, workers, stop_flag, pin_memory=pin_memory)
    stop_workers = partial(stop_flag.__setitem__, 0, 1)
    atexit.register(stop_workers)  # runs before multiprocessing's handler, which waits for the workers indefinitely
    try:
        while True:
            try:
                result = next(results, None)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker (pid"):
                    raise
                raise EnvironmentFault(
                    f"one of {workers} image decoding processes has died. The system kills processes when memory runs "
                    f"out or {SHARED_MEMORY}, through which they pass images, is full. Use fewer processes with "
                    "--workers, or provide more of either (in Docker: --shm-size 2g). The same command resumes from "
                    "the last saved state"
                ) from error
            if result is None:
                return
            if isinstance(result, PreluNetError):
                raise result
            array, rest = result
            yield (array.numpy() if isinstance(array, torch.Tensor) else array), rest
    finally:
        atexit.unregister(stop_workers)
        stop_workers()  # torch stops them next, but its request does not reach blocked workers


def _start_workers(
    work: "_MappedDataset", items: Iterable[Any], workers: int, stop_flag: mmap.mmap, *, pin_memory: bool
) -> Iterator[Any]:
    """Start the processes."""
    handler = signal.getsignal(signal.SIGCHLD)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
        loader = DataLoader(
            work,
            batch_size=None,
            sampler=items,
            num_workers=workers,
            collate_fn=lambda result: result,
            pin_memory=pin_memory,
            prefetch_factor=PREFETCH_FACTOR,
            multiprocessing_context="fork",
            worker_init_fn=partial(_init_worker, os.getpid(), stop_flag),
            generator=torch.Generator(),  # otherwise it would draw from the global one
        )
        results = iter(loader)
    # torch's handler would raise anywhere in the consumer, even while it saves its state.
    if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
        signal.signal(signal.SIGCHLD, handler)
    return results


class _MappedDataset(Dataset[Any]):
    """A dataset that calls the function in a worker process. shared: whether arrays pass through shared memory."""

    def __init__(self, function: Callable[[Any], tuple[UInt8Array, Any]], *, shared: bool) -> None:
        self._function, self._shared = function, shared

    def __getitem__(self, item: Any) -> Any:
        try:
            array, rest = self._function(item)
        except PreluNetError as error:
            return error  # if raised here, its message would become the worker's traceback
        except OSError as error:
            return from_os_error(error)
        return (torch.from_numpy(array) if self._shared else array), rest


def _init_worker(consumer: int, stop_flag: mmap.mmap, _worker: int) -> None:
    """Prepare a worker process: ignore the consumer's signals, and exit when the consumer dies or sets the flag.

    torch's own watchdog waits until the worker's results are consumed, which will not happen then.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == consumer and not stop_flag[0]:
            time.sleep(_POLL_SECONDS)
        if stop_flag[0]:
            time.sleep(_GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def free_shared_memory() -> int:
    """Return the free bytes of shared memory, 0 if there is no such file system."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return 0
