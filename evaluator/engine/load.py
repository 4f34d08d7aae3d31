"""Open model files: load, check and place them, on one device or on several GPUs."""

import ctypes
import importlib.metadata
import importlib.util
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np

from ..architectures import OpaqueNet
from ..contract import (
    INPUTS,
    OUTPUTS,
    ModelContract,
    contract_from_metadata,
    rewrite_hint,
)
from ..errors import ContractError, EnvironmentFault, PreluNetError, UsageError
from ..files import sha256_of
from ..json_checks import differences, format_differences
from ..machine import cores, has_processor_flags, onnxruntime_supports_int8, supports_int8
from .memory import cpu_rules, gpu_rules, require_loadable
from .runtimes import RUNTIMES, Device, onnx
from .runtimes.base import LoadedModel, Precision, error_summary
from .runtimes.onnx_metadata import read_metadata, read_precision
from .session import Circumstances, Placement, Session
from .verify import describe_failure, verify

log = logging.getLogger(__name__)

_DRIVER = "libcuda.so.1"  # part of the driver, whatever CUDA version the runtime brings
_ON_A_CPU = "On a CPU one session uses all cores: omit --gpus, and see --threads"

MAX_LANES_BYTES, LANES_SHARE = 2**27, 2**-5  # of a file that `add_lanes` loads twice; of a memory limit
LARGE_NET_FLOPS = 10e9  # per crop: see `choose_cpu_device`. A has 38e9, E 1.9e9, the demo net 0.03e9
# Per crop: see `self_check`. The golden images together, alone and on one canvas, are about 12 crops.
QUICK_CHECK_FLOPS = 5e9

_EXPORTS = {"fp16": "fp16", "int8": "int8 --calibrate DATA"}  # option of `prelunet export`, by requested precision


def open_session(
    path: Path, device: Device = "auto", *, precision: Precision | None = None, threads: int = 0
) -> Session:
    """Load a model file on a device; see `open_with_placement`, also for the errors."""
    return open_with_placement(path, Placement(device, precision, threads))


def open_with_placement(
    path: Path, placement: Placement, *, preallocate: bool = False, digest: str | None = None, check: bool = True
) -> Session:
    """Load a model file with a placement; the session's `circumstances` state what really runs it.

    Every runtime but onnxruntime's CPU provider in fp32, with which the file was checked when it was written, has to
    give the scores of its golden images (`self_check`). Where a GPU does not, or does not run, `auto` falls back to the
    CPU with a warning. An int8 file runs on CPUs only, and with OpenVINO first in a child process, since a runtime may
    crash (`openvino.try_first_run`).
    preallocate: also run the largest batch, because many images will follow; digest: SHA-256 of the file, if known;
    check: False for a caller that compares the golden images itself.

    Raises ContractError when the file is not ours or too new, EnvironmentFault when the device is unavailable, cannot
    compute in that precision or computes wrong scores, UsageError when the file cannot be read, no such device or
    precision exists, or the number of threads is negative.
    """
    for kind, value, choices in (
        ("device", placement.device, Device), ("precision", placement.precision or "fp32", Precision)
    ):  # fmt: skip
        if value not in get_args(choices):
            raise UsageError(f"no {kind} '{value}'. There are: {', '.join(get_args(choices))}")
    if placement.threads < 0:
        raise UsageError(f"threads is {placement.threads}: give a number of threads, or 0 for one per core")
    digest = digest or sha256_of(path)
    is_int8, device = read_precision(path) == "int8", placement.device
    if device == "auto":
        if placement.precision != "bf16" and not is_int8 and onnx.has_cuda_provider():
            try:
                return _open(path, replace(placement, device="cuda"), digest, preallocate=preallocate, check=check)
            except EnvironmentFault as error:
                log.warning("device auto: running on the CPU, because CUDA cannot be used: %s", error)
        device = choose_cpu_device(path, placement.precision)
    session = _open(path, replace(placement, device=device), digest, preallocate=preallocate, check=check)
    adopted = isinstance(session.contract.architecture, OpaqueNet)
    chosen = placement.precision is None and (adopted or placement.device == "auto")
    if is_int8 and chosen and session.circumstances.precision == "fp32":
        missing = not adopted and supports_int8()
        reason = "openvino is not installed" if missing else "this processor has neither VNNI nor AMX"
        log.warning("device %s: computing the int8 file %s in fp32, because %s", placement.device, path, reason)
    return session


def choose_cpu_device(path: Path, precision: Precision | None = None) -> Device:
    """Return the device with which `auto` runs a model file on this CPU: `openvino` or `cpu`.

    A fixed rule rather than a timing, so that a repeated run chooses the same. OpenVINO for bf16 and, if it is
    installed, for our int8 files, which only it computes in int8, on a processor that can (unless fp32 is requested),
    and for a net of at least LARGE_NET_FLOPS operations per crop on a processor with AVX-512: elsewhere and for smaller
    nets onnxruntime is as fast or faster in fp32 (benchmarks/results/engine-cpu-avx2.md). A malformed file is left to
    the device that loads it.
    """
    if precision == "bf16":
        return "openvino"
    if importlib.util.find_spec("openvino") is None:
        return "cpu"
    if importlib.util.find_spec("onnxruntime") is None:
        return "openvino"
    contract = _read_contract(path)
    if read_precision(path) == "int8":
        ours = contract is None or not isinstance(contract.architecture, OpaqueNet)
        return "openvino" if ours and (precision == "int8" or (precision is None and supports_int8())) else "cpu"
    if contract is None or not has_processor_flags("avx512f"):
        return "cpu"
    operations = 2 * (contract.multiply_adds(contract.crop, contract.crop) or 0)
    return "openvino" if operations >= LARGE_NET_FLOPS else "cpu"


def _read_contract(path: Path) -> ModelContract | None:
    """Return a file's contract before it is loaded; None for a malformed file, which loading reports."""
    try:
        return contract_from_metadata(read_metadata(path), str(path))
    except ContractError:
        return None


def open_sessions(path: Path, placement: Placement, gpus: int = 1) -> list[Session]:
    """Load a model file once per GPU, to evaluate many images.

    Sessions load one after another, because loading takes the most memory.
    gpus: number of GPUs, from the placement's on; 0 is all visible ones; 1 is any device, GPU or not.
    Raises UsageError for several GPUs on a CPU, EnvironmentFault when too few are visible or they are not alike, and
    otherwise as `open_with_placement`.
    """
    asked = RUNTIMES.get(placement.device)  # None for `auto`
    if gpus != 1 and asked is not None and not asked.gpu:
        raise UsageError(f"--gpus {gpus}: --device {placement.device} has no GPUs. {_ON_A_CPU}")
    if gpus and asked is not None and asked.gpu:
        _require_visible(gpus, placement.gpu)  # before anything is loaded
    first = open_with_placement(path, placement, preallocate=True)
    if gpus == 1:
        return [first]
    if not first.circumstances.on_gpu:
        raise EnvironmentFault(f"--gpus {gpus}: CUDA is unavailable, so the model would run on the CPU. {_ON_A_CPU}")
    _require_visible(gpus, placement.gpu)
    last = placement.gpu + gpus if gpus else visible_gpus()
    sessions = [first]
    for gpu in range(placement.gpu + 1, last):
        where = replace(first.placement, gpu=gpu)
        sessions.append(open_with_placement(path, where, preallocate=True, digest=first.model_sha256))
        _require_identical(first, sessions[-1])
    return sessions


def add_lanes(session: Session, path: Path) -> None:
    """Let a server's session on onnxruntime's CPU provider compute batches side by side, each on one thread.

    The threads of one batch wait for each other at every layer, which costs small nets and busy machines up to half of
    their throughput. All lanes share a second copy of the weights, so files that are large, also by the memory limit,
    have none. path: the session's file.
    """
    if lanes := lanes_within(session, session.placement.memory):
        quantized = session.circumstances.precision == "int8"
        session.add_lanes(onnx.load_on_cpu(path, threads=1, quantized=quantized), lanes)


def lanes_within(session: Session, memory: int | None) -> int:
    """Return the number of lanes that `add_lanes` gives a session within a limit of so many bytes, 0 for none."""
    where, lanes = session.placement, min(session.placement.threads or cores(), cores())
    largest = min(MAX_LANES_BYTES, LANES_SHARE * (memory or math.inf))
    return lanes if where.device == "cpu" and lanes > 1 and session.model_bytes <= largest else 0


def _open(path: Path, placement: Placement, digest: str, *, preallocate: bool, check: bool) -> Session:
    """Load a model file on exactly this device and check that it runs there."""
    device, file_bytes = placement.device, path.stat().st_size
    gpu = RUNTIMES[device].gpu
    if not gpu and placement.gpu_memory is not None:
        raise UsageError(f"--gpu-memory-limit: the model runs on a CPU (--device {device}). See --memory-limit")
    precision = placement.precision
    if (stated := _read_contract(path)) is not None:  # refuse the impossible before a gigabyte is loaded
        precision = _compute_precision(device, stated, precision, path)
    if placement.memory is not None and (stored := read_precision(path)):
        require_loadable(file_bytes, stored, placement.memory, device)
    masks = _needs_masks(path, device, placement.precision or "fp32")
    loaded, arena = RUNTIMES[device].load(
        path,
        precision=precision,
        threads=placement.threads,
        masks=masks,
        gpu=placement.gpu,
        gpu_memory=placement.gpu_memory,
        prepared_shapes=placement.prepared_shapes,
        spinning=placement.spinning,
    )
    contract = contract_from_metadata(loaded.metadata, str(path))
    if not masks:
        contract = replace(contract, canvas="exact")
    _check_interface(loaded, contract, path)
    precision = _compute_precision(device, contract, placement.precision, path)
    circumstances = Circumstances(loaded.provider, precision, package_versions(loaded.packages))
    if gpu:
        rules = gpu_rules(contract, arena, file_bytes, precision=precision)
    else:
        rules = cpu_rules(contract, placement.memory, file_bytes, device=device, precision=precision)
    session = Session(loaded, contract, digest, circumstances, placement, rules=rules, model_bytes=file_bytes)
    if check and (device != "cpu" or precision == "int8"):
        self_check(session, path.name)
    elif preallocate or gpu:  # there a successful load does not even prove that cuDNN is installed
        _run_blank(session, path.name, 1, contract.min_side)
    if gpu and preallocate:  # the GPU memory regions allocated for the largest batch fit all later ones
        side = max(contract.default_scales)
        _run_blank(session, path.name, rules.max_rows(side**2, math.prod(contract.window_grid(side, side))), side)
    return session


def _needs_masks(path: Path, device: Device, precision: Precision) -> bool:
    """Return whether images may be smaller than their canvas.

    In OpenVINO masks take 5 % of the time in bf16 with AMX, for nothing where `cpu_rules` gives each image a canvas of
    its own shape.
    """
    runtime = RUNTIMES[device]
    if not runtime.ragged or not runtime.switch_seconds or (contract := _read_contract(path)) is None:
        return runtime.ragged
    return cpu_rules(contract, None, 0, device=device, precision=precision).canvas_step > 1


def precisions_of(device: str, contract: ModelContract) -> tuple[Precision, ...]:
    """Return the precisions in which a device can compute a file, the default first.

    onnxruntime computes an adopted int8 net as it computes the original, where the processor has the instructions.
    """
    if contract.precision == "int8" and isinstance(contract.architecture, OpaqueNet):
        adopted = contract.training.get("adopted")
        if isinstance(adopted, dict) and adopted.get("quantized") == "operators":  # of integers, which only it knows
            return ("int8",) if device == "cpu" else ()
        if device == "cpu":
            return ("int8", "fp32") if onnxruntime_supports_int8() else ("fp32", "int8")
    return RUNTIMES[device].precisions.get(contract.precision, ())


def _compute_precision(device: Device, contract: ModelContract, requested: Precision | None, path: Path) -> Precision:
    """Return the precision that the model computes in; UsageError when the requested one is impossible."""
    possible, stored = precisions_of(device, contract), contract.precision
    adopted = isinstance(contract.architecture, OpaqueNet)
    if not possible:
        int8 = stored == "int8" and requested in {None, "int8"}
        fix = "Export it with --precision fp32" + (", or use --device openvino" if int8 else "")
        raise UsageError(f"--device {device}: {path} stores {stored}. {'Use --device cpu' if adopted else fix}")
    if requested is not None and requested not in possible:
        others = [f"--device {name}" for name in RUNTIMES if requested in precisions_of(name, contract)]
        options = _EXPORTS.get(requested, "fp32")  # of a file that can be computed so
        where = next(name for name in RUNTIMES if requested in RUNTIMES[name].precisions.get(options.split()[0], ()))
        another = f"--device {where} and another file: prelunet export --precision {options}"
        fix = "Omit --precision" if adopted and not others else f"{requested} needs {' or '.join(others) or another}"
        raise UsageError(
            f"--precision {requested}: {path} stores {stored}, which --device {device} computes in "
            f"{' or '.join(possible)}. {fix}"
        )
    return requested or possible[0]


def _check_interface(loaded: LoadedModel, contract: ModelContract, path: Path) -> None:
    """Refuse a file whose inputs, outputs, crop or number of classes do not match its contract."""
    fix = rewrite_hint(str(path))
    inputs, outputs = loaded.inputs, loaded.outputs
    if inputs != INPUTS or outputs != OUTPUTS:
        raise ContractError(
            f"{path}: inputs {inputs} and outputs {outputs}, but the contract has {INPUTS} and {OUTPUTS}. {fix}"
        )
    # The graph of an adopted net fixes the crop; ours leaves height and width open.
    sides = [side for side in loaded.image_shape[1:3] if isinstance(side, int)]
    if sides and {*sides, contract.crop, contract.max_side} != {contract.crop}:
        raise ContractError(
            f"{path}: its graph takes images of {'x'.join(map(str, sides))} pixels and nothing else, but the file "
            f"states a crop of {contract.crop} and sides up to {contract.max_side}. {fix}"
        )
    classes = loaded.scores_shape[-1]
    if classes != len(contract.classes):
        raise ContractError(f"{path}: {len(contract.classes)} classes are listed, but the graph has {classes}. {fix}")


def package_versions(packages: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of all packages that can change a score. packages: those that compute."""
    try:
        own = importlib.metadata.version("prelunet")
    except importlib.metadata.PackageNotFoundError:  # the benchmarks run from a checkout
        own = "not installed"
    return {
        "prelunet": own,
        **packages,
        "numpy": np.__version__,
        "pillow": importlib.metadata.version("pillow"),
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def self_check(session: Session, name: str, *, whole: bool = False) -> None:
    """Run the golden images of a model, and compare its scores with those stated in the file. name: for errors.

    Of a net with more than QUICK_CHECK_FLOPS operations per crop, for which all would take seconds, only the crop runs,
    unless `whole`: masks and shapes were checked when the file was written, and what another runtime or precision
    changes is the arithmetic, which is the same in every window. A file without golden images runs once.
    Raises EnvironmentFault when the model does not run, or when its scores deviate by more than its precision allows.
    """
    contract, circumstances = session.contract, session.circumstances
    if not contract.golden:
        log.warning("%s carries no golden images, so its scores on %s are not checked", name, circumstances.provider)
        _run_blank(session, name, 1, contract.min_side)
        return
    large = 2 * (contract.multiply_adds(contract.crop, contract.crop) or 0) > QUICK_CHECK_FLOPS
    with _errors(session, name, "its golden images"):
        deviations = verify(session, crop_only=large and not whole)
    if not (fault := describe_failure(name, session, deviations)):
        return
    fixes = {
        "cpu": "The file is damaged, or this version of onnxruntime computes wrong: see prelunet verify MODEL.onnx",
        "cuda": "If `prelunet verify MODEL.onnx --device cpu` passes, the GPU is at fault"
        + ("; in float32 it may round to tf32: use --precision tf32" if circumstances.precision == "fp32" else ""),
    }
    device = session.placement.device
    fix = fixes.get(device, f"Use --device cpu, and see prelunet verify MODEL.onnx --device {device}")
    raise EnvironmentFault(f"--device {device}: {fault}. {fix}")


def _run_blank(session: Session, name: str, rows: int, side: int) -> None:
    with _errors(session, name, f"{rows} canvases of {side}x{side}"):
        session.run(np.zeros((rows, side, side, 3), np.uint8), np.full((rows, 2), side, np.int64))


@contextmanager
def _errors(session: Session, name: str, inputs: str) -> Iterator[None]:
    try:
        yield
    except PreluNetError:
        raise
    except Exception as error:  # the runtime's own classes
        raise EnvironmentFault(
            f"model {name} loads but does not run on {session.circumstances.provider} with {inputs} "
            f"({type(error).__name__}: {error_summary(error)}). Try: prelunet verify MODEL.onnx"
        ) from error


def _require_visible(gpus: int, first: int) -> None:
    """Refuse more GPUs than are visible, counted from `first`. A single GPU is left to the runtime's own error."""
    if gpus > 1 and first + gpus > visible_gpus():
        raise EnvironmentFault(
            f"--gpus {gpus}: only {visible_gpus()} are visible (CUDA_VISIBLE_DEVICES can hide some). Request fewer, or "
            "all of them with --gpus 0"
        )


def _require_identical(first: Session, other: Session) -> None:
    """Refuse GPUs of different kinds or free memory: a run states one kind of GPU and one way of batching."""
    places = f"GPU {first.placement.gpu}", f"GPU {other.placement.gpu}"
    facts = [{**each.circumstances.to_json(), "batching": each.rules.to_json()} for each in (first, other)]
    if unequal := differences(*facts, places=places):
        raise EnvironmentFault(
            f"--gpus: {' and '.join(places)} would not compute identically:\n{format_differences(unequal)}\n"
            "Choose identical GPUs with CUDA_VISIBLE_DEVICES. If one has less free memory, stop the programs that use "
            "it, or limit all GPUs with --gpu-memory-limit"
        )


def visible_gpus() -> int:
    """Return the number of GPUs that CUDA shows to this process, 0 without a driver."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value
