"""Batches uploaded to a GPU, with host memory as the GPU: libcudart and the session are fakes that copy.

The placement check (tools/placement/README.md) shows that the real runtime accepts these calls.
"""

import ctypes
import gc
import signal
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.contract import OUTPUTS
from prelunet.evaluator.engine.runtimes import cuda
from prelunet.evaluator.engine.runtimes.cuda import ARENA_STEP, SLOTS, CudaBinding, CudaRuntime, cuda_options
from prelunet.evaluator.errors import EnvironmentFault

CLASSES = 6


class FakeCudart:
    """libcudart whose GPU is the host. fails: function → status.

    live, on_gpu: page-locked and GPU memory that is not freed yet; free: bytes that the GPU reports as free;
    allocation_limit: the largest allocation that succeeds.
    """

    def __init__(self, **fails: int):
        self._fails = fails
        self.live: dict[int, Any] = {}
        self.on_gpu: dict[int, Any] = {}
        self.devices: list[int] = []
        self.free = self.allocation_limit = 2**40
        self.cudaGetErrorString = lambda status: b"words of status %d" % status

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *arguments: self._fails.get(name, 0) or getattr(self, f"do_{name}", lambda *_: 0)(*arguments)

    def do_cudaSetDevice(self, gpu: ctypes.c_int) -> int:  # noqa: N802
        self.devices.append(gpu.value)
        return 0

    def do_cudaHostAlloc(self, address: Any, size: ctypes.c_size_t, flags: ctypes.c_uint) -> int:  # noqa: N802
        return self._allocate(self.live, address, size)

    def do_cudaFreeHost(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        del self.live[address.value or 0]
        return 0

    def do_cudaMalloc(self, address: Any, size: ctypes.c_size_t) -> int:  # noqa: N802
        assert self.devices[-1] == 1, "the GPU should have been chosen before"
        return 2 if size.value > self.allocation_limit else self._allocate(self.on_gpu, address, size)

    def do_cudaFree(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        del self.on_gpu[address.value or 0]
        return 0

    def _allocate(self, where: dict[int, Any], address: Any, size: ctypes.c_size_t) -> int:
        memory = (ctypes.c_uint8 * size.value)(*[99] * size.value)
        address._obj.value = ctypes.addressof(memory)
        where[address._obj.value] = memory
        return 0

    def do_cudaMemGetInfo(self, free: Any, total: Any) -> int:  # noqa: N802
        free._obj.value, total._obj.value = self.free, 2**50
        return 0

    def do_cudaGetDeviceProperties(self, properties: Any, gpu: ctypes.c_int) -> int:  # noqa: N802
        ctypes.memmove(properties, b"Card %d\0rest" % gpu.value, 12)
        return 0

    def do_cudaMemcpyAsync(self, target: Any, source: Any, size: Any, kind: Any, stream: Any) -> int:  # noqa: N802
        assert kind.value == 1, "host to device"
        there = self.on_gpu[target.value]
        assert size.value <= len(there), "the copy should stay within its memory"
        ctypes.memmove(target, source, size)
        return 0


class FakeOrtValue:
    """An OrtValue over numpy's memory."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numpy(self) -> np.ndarray:
        return self.array.copy()

    @staticmethod
    def ortvalue_from_numpy(array: np.ndarray) -> "FakeOrtValue":
        return FakeOrtValue(array)


class FakeIoBinding:
    """The inputs and outputs bound to a run."""

    def __init__(self) -> None:
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: dict[str, FakeOrtValue] = {}

    def bind_input(self, name: str, device: str, gpu: int, kind: Any, shape: tuple[int, ...], address: int) -> None:
        assert (device, gpu, kind) == ("cuda", 1, np.uint8)
        self.inputs[name] = np.ctypeslib.as_array((ctypes.c_uint8 * int(np.prod(shape))).from_address(address)).reshape(
            shape
        )

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        self.inputs[name] = array

    def bind_ortvalue_output(self, name: str, value: FakeOrtValue) -> None:
        self.outputs[name] = value

    def bind_output(self, name: str, device: str, gpu: int) -> None:
        assert (device, gpu) == ("cuda", 1)
        self.outputs[name] = FakeOrtValue(np.empty(0))

    def get_outputs(self) -> list[FakeOrtValue]:
        return list(self.outputs.values())


class FakeInferenceSession:
    """A session whose scores depend on the pixels it received. shapes: of its runs; threads: those that ran it."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.threads: set[threading.Thread] = set()

    def io_binding(self) -> FakeIoBinding:
        return FakeIoBinding()

    def run_with_iobinding(self, binding: FakeIoBinding) -> None:
        self.threads.add(threading.current_thread())
        images, sizes = binding.inputs["images"], binding.inputs["sizes"]
        self.shapes.append(images.shape[:3])
        assert list(binding.outputs) == list(OUTPUTS)
        sums = images.reshape(len(images), -1).astype(np.float64).sum(axis=1)
        binding.outputs["scores"].array[:] = sums[:, None]
        binding.outputs["logits"].array[:] = -sums[:, None]
        binding.outputs["windows"].array[:] = sizes
        binding.outputs["window_scores"] = FakeOrtValue(images.copy())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    found = FakeCudart()
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: found if name == "libcudart.so.13" else pytest.fail(name))
    return found


def bound(*sessions: FakeInferenceSession) -> CudaBinding:
    runtime: Any = SimpleNamespace(OrtValue=FakeOrtValue, cuda_version="13.0")
    return CudaBinding(runtime, sessions or [FakeInferenceSession()], CudaRuntime(runtime, 1), CLASSES)


def stage_in_thread(binding: CudaBinding) -> threading.Thread:
    """Stage a batch in a daemon thread, which lives on as long as no slot is free."""
    staging = threading.Thread(target=lambda: binding.stage(*batch(1, 4, 4, seed=9)), daemon=True)
    staging.start()
    return staging


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
    fourth = stage_in_thread(binding)
    fourth.join(0.3)
    assert fourth.is_alive(), "a fourth batch should wait for a slot"
    binding.compute(staged[0])
    fourth.join(30)
    assert not fourth.is_alive()


def test_a_batch_that_is_never_computed_gives_its_room_back(library: FakeCudart) -> None:
    binding = bound()
    for _ in range(3 * SLOTS):
        staging = stage_in_thread(binding)
        staging.join(30)
        assert not staging.is_alive(), "no slot is free"
        gc.collect()


def test_page_locked_memory_is_used_again_and_freed_in_the_end(library: FakeCudart) -> None:
    binding = bound()
    for seed in range(4 * SLOTS):
        binding.compute(binding.stage(*batch(2, 4, 6, seed=seed)))
    assert 0 < len(library.live) <= SLOTS
    assert len(library.on_gpu) == len(library.live)
    del binding
    gc.collect()
    assert library.live == library.on_gpu == {}


def test_a_slot_grows_by_powers_of_two_so_that_it_rarely_does(library: FakeCudart) -> None:
    binding = bound()
    sizes = set()
    for width in range(3, 300):
        binding.compute(binding.stage(*batch(1, 3, width, seed=width)))
        sizes |= {len(memory) for memory in (*library.on_gpu.values(), *library.live.values())}
    assert sizes <= {2**power for power in range(5, 13)}
    assert 3 * 3 * 299 <= max(sizes) < 2 * 3 * 3 * 299


def test_each_shape_runs_in_the_session_that_ran_it_last_and_a_new_one_where_the_longest_time_has_passed(
    library: FakeCudart,
) -> None:
    """A session plans its convolutions anew whenever the shape changes."""
    sessions = [FakeInferenceSession() for _ in range(3)]
    binding = bound(*sessions)
    for shape in [(2, 5, 7), (3, 5, 7), (2, 7, 5), (2, 5, 7), (3, 5, 7), (1, 9, 4), (2, 5, 7), (2, 7, 5)]:
        images, sizes = batch(*shape, seed=sum(shape))
        np.testing.assert_array_equal(binding.compute(binding.stage(images, sizes))[3](), images)
    assert sorted(session.shapes for session in sessions) == [
        [(2, 5, 7)] * 3, [(2, 7, 5), (1, 9, 4)], [(3, 5, 7)] * 2 + [(2, 7, 5)]
    ]  # fmt: skip


def test_one_thread_computes_for_all_callers(library: FakeCudart) -> None:
    """onnxruntime issue 29351: run from fresh threads, the arena of a session grows and grows."""
    session = FakeInferenceSession()
    binding = bound(session)
    for seed in range(3):
        caller = threading.Thread(target=binding.compute, args=(binding.stage(*batch(1, 4, 4, seed=seed)),))
        caller.start()
        caller.join(30)
    del caller
    binding.compute(binding.stage(*batch(1, 4, 4, seed=3)))
    (thread,) = session.threads
    assert len(session.shapes) == 4
    assert thread is not threading.current_thread()
    assert thread.is_alive()
    del binding
    gc.collect()
    thread.join(30)
    assert not thread.is_alive(), "it should end with the binding"


def test_a_batch_keeps_its_room_until_the_gpu_is_done_though_its_caller_is_interrupted(
    library: FakeCudart,
) -> None:
    session: Any = FakeInferenceSession()
    binding = bound(session)
    entered, gate, run = threading.Event(), threading.Event(), session.run_with_iobinding
    interrupted = threading.Event()

    def once(*_: Any) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def slowly(one: FakeIoBinding) -> None:
        entered.set()
        assert gate.wait(30)
        run(one)

    def interrupt() -> None:
        entered.wait(30)
        while not interrupted.wait(0.05):  # one that comes just before the main thread waits would not wake it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    session.run_with_iobinding = slowly
    staged = binding.stage(*batch(1, 4, 4, seed=1))
    before, interrupter = signal.signal(signal.SIGINT, once), threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            binding.compute(staged)
    finally:
        interrupter.join(30)
        signal.signal(signal.SIGINT, before)
    others = [binding.stage(*batch(1, 4, 4, seed=seed)) for seed in range(SLOTS - 1)]
    one_more = stage_in_thread(binding)
    one_more.join(0.3)
    assert one_more.is_alive(), "the GPU still reads the first batch"
    gate.set()
    one_more.join(30)
    assert not one_more.is_alive()
    assert len(others) == SLOTS - 1


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
        ) as failed:
            binding.stage(*batch(1, 4, 4, seed=0))
        kept.append(failed.value)  # with its traceback, as a Future keeps it


def test_a_slot_without_memory_is_tried_anew_with_the_next_batch(library: FakeCudart) -> None:
    binding = bound()
    library.allocation_limit = 1000
    small, large = batch(1, 4, 4, seed=1), batch(1, 20, 20, seed=2)
    binding.compute(binding.stage(*small))
    for _ in range(2 * SLOTS):
        with pytest.raises(EnvironmentFault, match=r"cudaMalloc failed on GPU 1 \(2: ") as failed:
            binding.stage(*large)
        del failed
        np.testing.assert_array_equal(binding.compute(binding.stage(*small))[3](), small[0])


def test_a_batch_whose_computation_fails_gives_its_room_back(library: FakeCudart) -> None:
    session: Any = FakeInferenceSession()
    binding = bound(session)

    def fails(_binding: FakeIoBinding) -> None:
        raise RuntimeError("an error of the runtime")

    session.run_with_iobinding = fails
    staged = []
    for seed in range(2 * SLOTS):
        staged.append(binding.stage(*batch(1, 4, 4, seed=seed)))
        with pytest.raises(RuntimeError, match="an error of the runtime"):
            binding.compute(staged[-1])


def test_a_missing_libcudart_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    with pytest.raises(EnvironmentFault, match=r"--device cuda: libcudart\.so\.13 cannot be loaded"):
        bound()


def test_options_are_text_and_hold_the_gpu_the_precision_and_the_limit() -> None:
    plain, limited = cuda_options(precision="fp32"), cuda_options(2, precision="tf32", memory=5_000_000_000)
    assert all(isinstance(value, str) for value in limited.values()), "the runtime takes nothing else"
    assert (plain["device_id"], plain["use_tf32"], "gpu_mem_limit" in plain) == ("0", "0", False)
    assert (limited["device_id"], limited["use_tf32"], limited["gpu_mem_limit"]) == ("2", "1", "5000000000")


def test_the_arena_may_have_four_fifths_of_what_is_free_in_steps_or_less_where_less_is_asked(
    library: FakeCudart,
) -> None:
    runtime: Any = SimpleNamespace(cuda_version="13.0")
    cuda = CudaRuntime(runtime, 1)
    library.free = 10 * ARENA_STEP + 12345
    assert cuda.arena_bytes() == 8 * ARENA_STEP
    library.free = 10 * ARENA_STEP - 12345
    assert cuda.arena_bytes() == 7 * ARENA_STEP
    assert cuda.arena_bytes(limit=3_000_000) == 3_000_000
    assert cuda.arena_bytes(limit=2**40) == 7 * ARENA_STEP, "more than there is helps nobody"
    library.free = 1000
    assert cuda.arena_bytes() == 800


def test_a_gpu_is_called_by_its_name(library: FakeCudart) -> None:
    runtime: Any = SimpleNamespace(cuda_version="13.0")
    assert CudaRuntime(runtime, 1).name() == "Card 1"


def test_a_batch_of_a_power_of_two_of_bytes_fills_its_slot(library: FakeCudart) -> None:
    binding = bound()
    for _ in range(2 * SLOTS):  # 256 bytes; no image has four channels, but memory does not care
        binding.compute(binding.stage(np.zeros((1, 8, 8, 4), np.uint8), np.array([[8, 8]])))
    assert {len(memory) for memory in library.on_gpu.values()} == {256}
