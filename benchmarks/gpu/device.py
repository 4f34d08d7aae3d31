"""The device of the GPU benchmarks: whether it works, raw sessions with any options, and its circumstances."""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import PIL
import torch

from benchmarks.common.rig import TINY, Rig
from prelunet.evaluator.arrays import Int64Array, UInt8Array
from prelunet.evaluator.engine.runtimes.cuda import DISABLED_OPTIMIZERS, cuda_options
from prelunet.evaluator.engine.runtimes.onnx import CPU, CUDA, import_runtime
from prelunet.evaluator.errors import EnvironmentFault

SMI = "driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,pstate,memory.used"


def check_provider(rig: Rig) -> None:
    """Open a small net and run it; raises SystemExit if it does not run on the requested device."""
    small = Rig(rig.device, tiny=True, files=rig.files)
    try:
        session = small.session("A", "fp16")
        image = np.zeros((1, TINY.crop, TINY.crop, 3), np.uint8)
        session.run(image, np.array([image.shape[1:3]], np.int64))  # cuDNN is loaded only here
    except Exception as error:  # the runtime's own exceptions have no common base
        raise SystemExit(f"--device {rig.device}: unavailable: {error}") from error
    expected = CUDA if rig.on_gpu else CPU
    if session.circumstances.provider != expected:
        raise SystemExit(f"--device {rig.device}: {session.circumstances.provider} was opened instead of {expected}")


def check_torch(device: str) -> None:
    """Raise SystemExit if torch finds no GPU, or is built for another CUDA than onnxruntime."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"--device cuda: unavailable: torch {torch.__version__} finds no GPU. "
            "To rehearse without one: --device cpu --tiny"
        )
    major = str(torch.version.cuda).partition(".")[0]
    theirs = str(getattr(import_runtime(), "cuda_version", "")).partition(".")[0]
    if device == "cuda" and theirs and major != theirs:
        raise SystemExit(
            f"torch is built for CUDA {major} and onnxruntime for CUDA {theirs}: in one process one of them would load "
            "the other's cuDNN. Install both for the same CUDA version"
        )


def noise_batch(rows: int, height: int, width: int, seed: int = 0) -> tuple[UInt8Array, Int64Array]:
    """Return images of noise that fill their canvases, and their sizes: a model's inputs."""
    images = np.random.default_rng(seed).integers(0, 256, (rows, height, width, 3), np.uint8)
    return images, np.tile(np.array([height, width], np.int64), (rows, 1))


def raw_session(rig: Rig, path: Path) -> Any:
    """Open a model file directly in onnxruntime, on the rig's device and with our options."""
    runtime = import_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    if rig.on_gpu:
        options.intra_op_num_threads = 1
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = (CUDA, cuda_options()) if rig.on_gpu else CPU
    session = runtime.InferenceSession(
        os.fspath(path), options, providers=[provider], enable_fallback=0, disabled_optimizers=DISABLED_OPTIMIZERS
    )
    if session.get_providers()[0] != (CUDA if rig.on_gpu else CPU):
        raise EnvironmentFault(f"{path.name}: the session runs on {session.get_providers()[0]}")
    return session


def device_circumstances(rig: Rig, general: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return everything the results depend on. general: of `results.circumstances`; source: digest of the code."""
    runtime = import_runtime()
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        **general,
        "device": rig.device,
        "tiny": rig.tiny,
        "gpu": torch.cuda.get_device_name() if rig.on_gpu else None,
        "gpu_memory_gb": round(torch.cuda.mem_get_info()[1] / 1e9, 1) if rig.on_gpu else None,
        "versions": {  # of the imported packages, which may not be installed
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": str(cudnn) if cudnn else None,
            "onnxruntime": runtime.__version__,
            "onnx": onnx.__version__,
            "numpy": np.__version__,
            "pillow": PIL.__version__,
        },
        "onnxruntime": {
            "package_name": getattr(runtime, "package_name", None),
            "build": runtime.get_build_info() if hasattr(runtime, "get_build_info") else None,
            "providers": runtime.get_available_providers(),
        },
        "provider_options": cuda_options() if rig.on_gpu else {},
        "source": source,
        "first": watch(rig),
    }


def watch(rig: Rig) -> dict[str, str]:
    """Return driver, clocks, power and temperature from nvidia-smi; empty if unavailable."""
    program = shutil.which("nvidia-smi")
    if not rig.on_gpu or program is None:
        return {}
    command = [program, f"--query-gpu={SMI}", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):  # the clocks are not worth losing a measurement
        return {}
    line = process.stdout.strip().splitlines()[:1]
    return dict(zip(SMI.split(","), (value.strip() for value in line[0].split(",")), strict=False)) if line else {}
