"""How models run on CUDA: the provider's options, and batches that are uploaded while others are computed.

The reasons of each option, with measurements of others, are in docs/gpu.md.
"""

import ctypes
import queue
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from evaluator.contract import OUTPUTS
from evaluator.errors import EnvironmentFault

SLOTS = 3  # batches on the GPU: one is computed, one waits for that, one is being uploaded

_HOST_TO_DEVICE, _NON_BLOCKING = 1, 1  # cudaMemcpyHostToDevice, cudaStreamNonBlocking


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


@dataclass(eq=False)
class Slot:
    """Memory for one batch of canvases: page-locked on the host, and its copy on the GPU. Grows, and is used again."""

    pinned: npt.NDArray[np.uint8]
    on_gpu: Any = None  # an OrtValue of as many bytes


@dataclass(eq=False)
class Uploaded:
    """A batch on the GPU. shape: of its canvases; free: gives the slot back, as the end of the last reference does."""

    slot: Slot
    shape: tuple[int, ...]
    sizes: npt.NDArray[np.int64]
    free: Callable[[], Any] = lambda: None


class CudaBinding:
    """Inputs and outputs of a session that live on the GPU.

    A batch is uploaded by `stage` in one thread, on a stream of its own, while `compute` runs another in the thread
    that owns the session. The small outputs are written straight into numpy's memory; window scores, 2 MB a view, stay
    on the GPU until somebody asks for them.
    """

    def __init__(self, runtime: ModuleType, session: Any, gpu: int, classes: int):
        self._runtime = runtime
        self._session = session
        self._gpu = gpu
        self._classes = classes
        self._cuda = CudaRuntime(runtime, gpu)
        self._slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for _ in range(SLOTS):
            self._slots.put(Slot(np.empty(0, np.uint8)))

    def stage(self, images: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> Uploaded:
        """Upload a batch; returns when it is on the GPU. Waits while SLOTS batches are there."""
        slot = self._slots.get()
        batch = Uploaded(slot, images.shape, sizes)
        batch.free = weakref.finalize(batch, self._slots.put, slot)
        try:
            if slot.pinned.nbytes < images.nbytes:
                self._grow(slot, images.nbytes)
            np.copyto(slot.pinned[: images.nbytes].reshape(images.shape), images)
            self._cuda.upload(slot.pinned[: images.nbytes], slot.on_gpu.data_ptr())
        except BaseException:
            batch.free()  # an error that somebody keeps would keep the batch too
            raise
        return batch

    def _grow(self, slot: Slot, size: int) -> None:
        """Give a slot so many bytes; when that fails it has none."""
        slot.pinned, slot.on_gpu = np.empty(0, np.uint8), None  # first, so that the new ones may take their place
        on_gpu = self._session.create_ortvalue_from_shape_and_type([size], np.uint8, "cuda", self._gpu)
        slot.pinned, slot.on_gpu = self._cuda.pinned(size), on_gpu

    def compute(self, batch: Uploaded) -> list[Any]:
        """Run an uploaded batch; see `LoadedModel.compute`."""
        try:
            return self._compute(batch)
        finally:
            batch.free()

    def _compute(self, batch: Uploaded) -> list[Any]:
        rows, value = batch.shape[0], self._runtime.OrtValue
        small = [
            np.empty((rows, self._classes), np.float32),
            np.empty((rows, self._classes), np.float32),
            np.empty((rows, 2), np.int64),
        ]
        binding = self._session.io_binding()  # anew, because outputs stay bound to the run before
        binding.bind_input("images", "cuda", self._gpu, np.uint8, batch.shape, batch.slot.on_gpu.data_ptr())
        binding.bind_cpu_input("sizes", batch.sizes)
        for name, array in zip(OUTPUTS, small, strict=False):
            binding.bind_ortvalue_output(name, value.ortvalue_from_numpy(array))
        binding.bind_output(OUTPUTS[-1], "cuda", self._gpu)
        self._session.run_with_iobinding(binding)
        window_scores = binding.get_outputs()[-1]
        return [*small, window_scores.numpy]


class CudaRuntime:
    """The few functions of libcudart that onnxruntime's Python interface lacks: page-locked memory and a stream.

    Its own uploads copy from pageable memory, in the default stream, and keep the interpreter meanwhile.
    Raises EnvironmentFault when the library is missing or a call fails.
    """

    def __init__(self, runtime: ModuleType, gpu: int):
        name = f"libcudart.so.{str(runtime.cuda_version).partition('.')[0]}"
        try:
            self._library = ctypes.CDLL(name)  # onnxruntime has loaded it
        except OSError as error:
            raise EnvironmentFault(f"--device cuda: {name} cannot be loaded ({error}). Install CUDA") from error
        self._gpu = gpu
        self._stream = ctypes.c_void_p()
        self._use_gpu()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING))

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        """Return so many bytes of page-locked memory; they are freed with the array and all its views."""
        address = ctypes.c_void_p()
        self._use_gpu()
        self._call("cudaHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(0))
        buffer = (ctypes.c_uint8 * size).from_address(address.value or 0)
        weakref.finalize(buffer, self._library.cudaFreeHost, address)
        return np.frombuffer(memoryview(buffer), np.uint8)

    def upload(self, source: npt.NDArray[np.uint8], target: int) -> None:
        """Copy bytes to an address on the GPU and wait for it, without keeping the interpreter."""
        self._use_gpu()
        self._call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(target),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_size_t(source.nbytes),
            ctypes.c_int(_HOST_TO_DEVICE),
            self._stream,
        )
        self._call("cudaStreamSynchronize", self._stream)

    def _use_gpu(self) -> None:
        """Choose the GPU, which each calling thread has to do for itself: in others the functions would take GPU 0."""
        self._call("cudaSetDevice", ctypes.c_int(self._gpu))

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            describe = self._library.cudaGetErrorString
            describe.restype = ctypes.c_char_p
            words = (describe(status) or b"").decode(errors="replace")
            raise EnvironmentFault(f"--device cuda: {function} failed on GPU {self._gpu} ({status}: {words})")
