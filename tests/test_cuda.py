"""Batches on their way to a GPU, with host memory in the GPU's place: libcudart and the session are fakes that copy.

That the real runtime takes these calls is shown by the placement check (docs/gpu.md).
"""

import ctypes
import gc
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evaluator.contract import OUTPUTS
from evaluator.engine import cuda
from evaluator.engine.cuda import SLOTS, CudaBinding, cuda_options
from evaluator.errors import EnvironmentFault

CLASSES = 6


class FakeCudart:
    """libcudart whose GPU is the host. fails: function → status. live: page-locked bytes that are not freed yet."""

    def __init__(self, **fails: int):
        self._fails = fails
        self.live: dict[int, Any] = {}
        self.devices: list[int] = []
        self.cudaGetErrorString = lambda status: b"words of status %d" % status

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *arguments: self._fails.get(name, 0) or getattr(self, f"do_{name}", lambda *_: 0)(*arguments)

    def do_cudaSetDevice(self, gpu: ctypes.c_int) -> int:  # noqa: N802
        self.devices.append(gpu.value)
        return 0

    def do_cudaHostAlloc(self, address: Any, size: ctypes.c_size_t, flags: ctypes.c_uint) -> int:  # noqa: N802
        memory = (ctypes.c_uint8 * size.value)()
        address._obj.value = ctypes.addressof(memory)
        self.live[address._obj.value] = memory
        return 0

    def do_cudaFreeHost(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        del self.live[address.value or 0]
        return 0

    def do_cudaMemcpyAsync(self, target: Any, source: Any, size: Any, kind: Any, stream: Any) -> int:  # noqa: N802
        assert kind.value == 1, "host to device"
        ctypes.memmove(target, source, size)
        return 0


class Value:
    """An OrtValue over numpy's memory."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numpy(self) -> np.ndarray:
        return self.array.copy()

    @staticmethod
    def ortvalue_from_numpy(array: np.ndarray) -> "Value":
        return Value(array)


class Binding:
    """What a run is bound to."""

    def __init__(self) -> None:
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: dict[str, Value] = {}

    def bind_input(self, name: str, device: str, gpu: int, kind: Any, shape: tuple[int, ...], address: int) -> None:
        assert (device, gpu, kind) == ("cuda", 1, np.uint8)
        self.inputs[name] = np.ctypeslib.as_array((ctypes.c_uint8 * int(np.prod(shape))).from_address(address)).reshape(
            shape
        )

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        self.inputs[name] = array

    def bind_ortvalue_output(self, name: str, value: Value) -> None:
        self.outputs[name] = value

    def bind_output(self, name: str, device: str, gpu: int) -> None:
        assert (device, gpu) == ("cuda", 1)
        self.outputs[name] = Value(np.empty(0))

    def get_outputs(self) -> list[Value]:
        return list(self.outputs.values())


class RuntimeSession:
    """A session whose scores tell which pixels it was given."""

    def create_ortvalue_from_shape_and_type(self, shape: list[int], kind: Any, device: str, gpu: int) -> Value:
        assert (device, gpu) == ("cuda", 1)
        return Value(np.full(shape, 99, kind))

    def io_binding(self) -> Binding:
        return Binding()

    def run_with_iobinding(self, binding: Binding) -> None:
        images, sizes = binding.inputs["images"], binding.inputs["sizes"]
        assert list(binding.outputs) == list(OUTPUTS)
        sums = images.reshape(len(images), -1).astype(np.float64).sum(axis=1)
        binding.outputs["scores"].array[:] = sums[:, None]
        binding.outputs["logits"].array[:] = -sums[:, None]
        binding.outputs["windows"].array[:] = sizes
        binding.outputs["window_scores"] = Value(images.copy())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    found = FakeCudart()
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: found if name == "libcudart.so.13" else pytest.fail(name))
    return found


def bound() -> CudaBinding:
    return CudaBinding(SimpleNamespace(OrtValue=Value, cuda_version="13.0"), RuntimeSession(), 1, CLASSES)  # type: ignore[arg-type]


def batch(rows: int, height: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    images = np.random.default_rng(seed).integers(0, 256, (rows, height, width, 3), dtype=np.uint8)
    return images, np.array([[height - 1, width - row] for row in range(rows)], np.int64)


def test_what_is_uploaded_is_what_is_computed_whatever_the_order_of_sizes(library: FakeCudart) -> None:
    binding = bound()
    for seed, shape in enumerate([(2, 5, 7), (3, 9, 4), (1, 3, 3), (2, 5, 7), (4, 9, 9)]):
        images, sizes = batch(*shape, seed=seed)
        scores, logits, windows, take = binding.compute(binding.stage(images, sizes))
        sums = images.reshape(len(images), -1).sum(axis=1)
        np.testing.assert_array_equal(scores, np.repeat(sums[:, None], CLASSES, axis=1))
        np.testing.assert_array_equal(logits, -scores)
        np.testing.assert_array_equal(windows, sizes)
        np.testing.assert_array_equal(take(), images)
        assert (scores.dtype, windows.dtype) == (np.float32, np.int64)
    assert set(library.devices) == {1}


def test_a_view_with_its_columns_reversed_is_uploaded_as_it_looks(library: FakeCudart) -> None:
    binding = bound()
    images, sizes = batch(2, 5, 7, seed=3)
    _, _, _, take = binding.compute(binding.stage(images[:, :, ::-1], sizes))
    np.testing.assert_array_equal(take(), images[:, :, ::-1])


def test_batches_that_wait_keep_their_own_pixels_until_they_are_computed(library: FakeCudart) -> None:
    binding = bound()
    batches = [batch(2, 4, 6, seed=seed) for seed in range(SLOTS)]
    staged = [binding.stage(*one) for one in batches]
    for (images, _), waiting in zip(batches, staged, strict=True):
        np.testing.assert_array_equal(binding.compute(waiting)[3](), images)


def test_no_more_than_three_batches_are_on_the_gpu_and_the_next_waits_for_one_to_be_computed(
    library: FakeCudart,
) -> None:
    binding = bound()
    staged = [binding.stage(*batch(1, 4, 4, seed=seed)) for seed in range(SLOTS)]
    fourth = threading.Thread(target=lambda: staged.append(binding.stage(*batch(1, 4, 4, seed=9))))
    fourth.start()
    fourth.join(0.3)
    assert fourth.is_alive(), "a fourth batch should wait for room"
    binding.compute(staged[0])
    fourth.join(30)
    assert len(staged) == SLOTS + 1


def test_a_batch_that_is_never_computed_gives_its_room_back(library: FakeCudart) -> None:
    binding = bound()
    for seed in range(3 * SLOTS):
        binding.stage(*batch(1, 4, 4, seed=seed))
        gc.collect()


def test_page_locked_memory_is_used_again_and_freed_in_the_end(library: FakeCudart) -> None:
    binding = bound()
    for seed in range(4 * SLOTS):
        binding.compute(binding.stage(*batch(2, 4, 6, seed=seed)))
    assert len(library.live) <= SLOTS
    del binding
    gc.collect()
    assert library.live == {}


def test_a_batch_that_could_not_be_uploaded_is_an_error_with_cudas_words_and_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = FakeCudart(cudaMemcpyAsync=719)
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda _name: broken)
    binding = bound()
    kept = []
    for _ in range(2 * SLOTS):
        with pytest.raises(
            EnvironmentFault, match=r"cudaMemcpyAsync failed on GPU 1 \(719: words of status 719\)"
        ) as told:
            binding.stage(*batch(1, 4, 4, seed=0))
        kept.append(told.value)  # with its traceback, as a Future keeps it


def test_a_slot_without_memory_is_tried_anew_with_the_next_batch(library: FakeCudart) -> None:
    binding = bound()
    session: Any = binding._session
    create = session.create_ortvalue_from_shape_and_type

    def full(shape: list[int], *rest: Any) -> Value:
        if shape[0] > 1000:
            raise RuntimeError("Available memory of 5 is smaller than requested bytes of 1200")
        return create(shape, *rest)

    session.create_ortvalue_from_shape_and_type = full
    small, large = batch(1, 4, 4, seed=1), batch(1, 20, 20, seed=2)
    binding.compute(binding.stage(*small))
    for _ in range(2 * SLOTS):
        with pytest.raises(RuntimeError, match="smaller than requested"):
            binding.stage(*large)
        np.testing.assert_array_equal(binding.compute(binding.stage(*small))[3](), small[0])


def test_a_batch_whose_computation_fails_gives_its_room_back(library: FakeCudart) -> None:
    binding = bound()
    session: Any = binding._session

    def fails(_binding: Binding) -> None:
        raise RuntimeError("an error of the runtime")

    session.run_with_iobinding = fails
    staged = []
    for seed in range(2 * SLOTS):
        staged.append(binding.stage(*batch(1, 4, 4, seed=seed)))
        with pytest.raises(RuntimeError, match="an error of the runtime"):
            binding.compute(staged[-1])


def test_a_missing_libcudart_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    with pytest.raises(EnvironmentFault, match=r"--device cuda: libcudart\.so\.13 cannot be loaded"):
        bound()


def test_options_are_text_and_hold_the_gpu_the_precision_and_the_limit() -> None:
    plain, limited = cuda_options(), cuda_options(2, tf32=True, memory=5_000_000_000)
    assert all(isinstance(value, str) for value in limited.values()), "the runtime takes nothing else"
    assert (plain["device_id"], plain["use_tf32"], "gpu_mem_limit" in plain) == ("0", "0", False)
    assert (limited["device_id"], limited["use_tf32"], limited["gpu_mem_limit"]) == ("2", "1", "5000000000")
