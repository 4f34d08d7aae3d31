"""Run models on CUDA: the provider's options, and uploads that overlap with computing.

README.md gives the reason for each option, with measurements of the alternatives.
"""

import ctypes
import queue
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import numpy as np

from ...arrays import Int64Array, UInt8Array
from ...contract import OUTPUTS
from ...errors import EnvironmentFault

GpuPrecision = Literal["fp32", "tf32", "fp16"]

SLOTS = 3  # batches on the GPU: one computing, one waiting, one being uploaded
ARENA_SHARE = 0.8  # of free memory; the rest is for batches, cuDNN, the driver and other programs
ARENA_STEP = 2**29  # bytes: small changes of free memory change no batches, and so no results
GPU_WEIGHT_COPIES = 2.5  # of a model file, in each session: an assumption
SESSION_BATCH_BYTES = 3 * 2**30  # at least, where there are several: 8 Mpixel of net A, as in a server's largest batch

# Biases that a file adds in nodes of their own stay there: cuDNN's kernel for a convolution's bias takes twice as long.
DISABLED_OPTIMIZERS = ["ConvAddFusion"]

_HOST_TO_DEVICE, _NON_BLOCKING = 1, 1  # cudaMemcpyHostToDevice, cudaStreamNonBlocking
_PROPERTIES, _NAME = 4096, 256  # bytes: more than struct cudaDeviceProp has, and of the name at its start


def cuda_options(gpu: int = 0, *, precision: GpuPrecision = "fp16", memory: int | None = None) -> dict[str, str]:
    """Return the options of the CUDA provider, which accepts only text.

    gpu: index, from 0; precision: to compute in; memory: limit of its arena in bytes, without what cuDNN and the driver
    take.
    """
    options = {
        "device_id": str(gpu),
        # The other searches plan every convolution anew for longer at each change of shape, and plan it worse.
        "cudnn_conv_algo_search": "HEURISTIC",
        "prefer_nhwc": "1",  # the layout of the tensor cores
        # In half precision too: without it cuDNN first looks in vain for a plan without tensor cores.
        "use_tf32": str(int(precision != "fp32")),
        "arena_extend_strategy": "kNextPowerOfTwo",  # exact regions would never be merged, and shapes vary
    }
    return options if memory is None else {**options, "gpu_mem_limit": str(memory)}


def sessions_in(arena: int, wanted: int, file_bytes: int) -> int:
    """Return how many sessions of a file, from 1 to `wanted`, can share the bytes of an arena.

    Each keeps the plans of the last shape that it ran, so as many shapes can alternate without a change.
    """
    return max(1, min(wanted, int(arena / (GPU_WEIGHT_COPIES * file_bytes + SESSION_BATCH_BYTES))))


@dataclass(eq=False)
class GpuMemory:
    """A block of GPU memory. address: of its first byte."""

    address: int = 0  # no memory


@dataclass(eq=False)
class Slot:
    """Reusable memory for one batch of canvases: page-locked on the host, and as much on the GPU. Grows on demand."""

    pinned: UInt8Array = field(default_factory=lambda: np.empty(0, np.uint8))
    on_gpu: GpuMemory = field(default_factory=GpuMemory)


@dataclass(eq=False)
class UploadedBatch:
    """A batch on the GPU.

    shape: of its canvases; free: returns the slot, as garbage collection of the batch does.
    """

    slot: Slot
    shape: tuple[int, ...]
    sizes: Int64Array
    free: Callable[[], Any] = lambda: None


class CudaBinding:
    """Binds the inputs and outputs of a model's sessions to GPU memory, and chooses the session for each batch.

    `stage` uploads a batch in one thread, on its own CUDA stream, while `compute` runs another. The small outputs go
    straight into numpy arrays; window scores, 2 MB a view, stay on the GPU until they are fetched.

    A thread of the binding computes, whoever calls: if ever new threads run a session, its arena grows without limit
    (onnxruntime issue 29351). Batches lie outside the arena: a queued run may still write to memory that the arena has
    handed out (issue 32342).
    """

    def __init__(self, runtime: ModuleType, sessions: Sequence[Any], cuda: "CudaRuntime", classes: int):
        self._runtime = runtime
        # With the shape that each ran last; the one that has been idle for longest comes first.
        self._sessions: list[tuple[tuple[int, ...], Any]] = [((), session) for session in sessions]
        self._cuda = cuda
        self._classes = classes
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"cuda-{cuda.gpu}")
        # Start the thread now: a Ctrl-C while the first batch starts it could leave two.
        self._worker.submit(cuda.set_device).result()
        self._slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for _ in range(SLOTS):
            self._slots.put(Slot())

    def stage(self, images: UInt8Array, sizes: Int64Array) -> UploadedBatch:
        """Upload a batch and return when it is on the GPU. Blocks while all SLOTS are taken."""
        slot = self._slots.get()
        batch = UploadedBatch(slot, images.shape, sizes)
        batch.free = weakref.finalize(batch, self._slots.put, slot)
        try:
            if slot.pinned.nbytes < images.nbytes:
                self._grow(slot, images.nbytes)
            np.copyto(slot.pinned[: images.nbytes].reshape(images.shape), images)
            self._cuda.upload(slot.pinned[: images.nbytes], slot.on_gpu)
        except BaseException:
            batch.free()  # an exception that someone keeps would keep the batch too
            raise
        return batch

    def _grow(self, slot: Slot, size: int) -> None:
        """Grow a slot to the next power of two, so that it rarely grows. If that fails, the slot is empty."""
        size = 1 << (size - 1).bit_length()
        # Free the old memory first, so that the new blocks can take its place.
        slot.pinned, slot.on_gpu = np.empty(0, np.uint8), GpuMemory()
        on_gpu = self._cuda.allocate(size)
        slot.pinned, slot.on_gpu = self._cuda.allocate_pinned(size), on_gpu

    def compute(self, batch: UploadedBatch) -> list[Any]:
        """Run an uploaded batch; see `LoadedModel.compute`. Any thread may call this; batches run one at a time."""
        return self._worker.submit(self._compute, batch).result()

    def _compute(self, batch: UploadedBatch) -> list[Any]:
        rows, value, gpu = batch.shape[0], self._runtime.OrtValue, self._cuda.gpu
        small = [
            np.empty((rows, self._classes), np.float32),
            np.empty((rows, self._classes), np.float32),
            np.empty((rows, 2), np.int64),
        ]
        try:
            session = self._session_for(batch.shape)
            binding = session.io_binding()  # a new one, because outputs stay bound to the previous run
            binding.bind_input("images", "cuda", gpu, np.uint8, batch.shape, batch.slot.on_gpu.address)
            binding.bind_cpu_input("sizes", batch.sizes)
            for name, array in zip(OUTPUTS, small, strict=False):
                binding.bind_ortvalue_output(name, value.ortvalue_from_numpy(array))
            binding.bind_output(OUTPUTS[-1], "cuda", gpu)
            session.run_with_iobinding(binding)
        finally:
            batch.free()  # here, because an interrupted caller leaves while the GPU still reads the batch
        window_scores = binding.get_outputs()[-1]
        return [*small, window_scores.numpy]

    def _session_for(self, shape: tuple[int, ...]) -> Any:
        """Return the session that ran this shape last, else the one that has been idle for longest."""
        place = next((place for place, (last, _) in enumerate(self._sessions) if last == shape), 0)
        _, session = self._sessions.pop(place)
        self._sessions.append((shape, session))
        return session


class CudaRuntime:
    """Functions of libcudart that onnxruntime's Python interface lacks: memory, a stream, GPU properties.

    onnxruntime's own uploads copy from pageable memory, in the default stream, and hold the interpreter lock.
    Raises EnvironmentFault when the library is missing or a call fails.
    """

    def __init__(self, runtime: ModuleType, gpu: int):
        name = f"libcudart.so.{str(runtime.cuda_version).partition('.')[0]}"
        try:
            self._library = ctypes.CDLL(name)  # the one that onnxruntime loads
        except OSError as error:
            raise EnvironmentFault(f"--device cuda: {name} cannot be loaded ({error}). Install CUDA") from error
        self.gpu = gpu
        self._stream = ctypes.c_void_p()
        self.set_device()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING))

    def name(self) -> str:
        """Return the name of the GPU."""
        properties = ctypes.create_string_buffer(_PROPERTIES)
        self._call("cudaGetDeviceProperties", properties, ctypes.c_int(self.gpu))
        return properties.raw[:_NAME].split(b"\0")[0].decode("ascii", errors="replace")

    def arena_bytes(self, limit: int | None = None) -> int:
        """Return the size of the runtime's arena: a share of the memory that is free now, or `limit` if that is less.

        The share is rounded down to whole ARENA_STEPs, unless it is smaller than one.
        """
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.set_device()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        share = int(ARENA_SHARE * free.value)
        share = share // ARENA_STEP * ARENA_STEP or share
        return share if limit is None else min(limit, share)

    def allocate(self, size: int) -> GpuMemory:
        """Allocate `size` bytes on the GPU; they are freed with the object."""
        address = ctypes.c_void_p()
        self.set_device()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        memory = GpuMemory(address.value or 0)
        weakref.finalize(memory, self._library.cudaFree, address)
        return memory

    def allocate_pinned(self, size: int) -> UInt8Array:
        """Allocate `size` bytes of page-locked memory; they are freed with the array and all its views."""
        address = ctypes.c_void_p()
        self.set_device()
        self._call("cudaHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(0))
        buffer = (ctypes.c_uint8 * size).from_address(address.value or 0)
        weakref.finalize(buffer, self._library.cudaFreeHost, address)
        return np.frombuffer(memoryview(buffer), np.uint8)

    def upload(self, source: UInt8Array, target: GpuMemory) -> None:
        """Copy bytes to the GPU and wait for the copy, without holding the interpreter lock."""
        self.set_device()
        self._call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(target.address),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_size_t(source.nbytes),
            ctypes.c_int(_HOST_TO_DEVICE),
            self._stream,
        )
        self._call("cudaStreamSynchronize", self._stream)

    def set_device(self) -> None:
        """Select the GPU for the calling thread; without this, a new thread would use GPU 0."""
        self._call("cudaSetDevice", ctypes.c_int(self.gpu))

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            describe = self._library.cudaGetErrorString
            describe.restype = ctypes.c_char_p
            message = (describe(status) or b"").decode(errors="replace")
            raise EnvironmentFault(f"--device cuda: {function} failed on GPU {self.gpu} ({status}: {message})")
