"""What `prelunet doctor` looks at: one finding for each thing that can be right or wrong with a machine."""

import importlib.metadata
import os
import platform
import resource
import socket
import statistics
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from prelunet.evaluator.contract import ModelContract, golden_image
from prelunet.evaluator.engine.load import open_with_placement, visible_gpus
from prelunet.evaluator.engine.memory import format_bytes
from prelunet.evaluator.engine.runtimes import onnx, openvino
from prelunet.evaluator.engine.runtimes.base import LoadedModel
from prelunet.evaluator.engine.session import Placement, Session
from prelunet.evaluator.engine.verify import Deviation, deviation, tolerance_of
from prelunet.evaluator.errors import PreluNetError, install_hint
from prelunet.evaluator.machine import cores, machine_memory
from prelunet.evaluator.serving.options import RESERVED_FILES, ServerLimits

State = Literal["ok", "note", "wrong"]

_PACKAGES = ("prelunet", "numpy", "pillow", "grpcio", "protobuf", "prometheus-client")
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")  # of one import package
_ROUND_TRIPS = 20

# A model file without metadata, of the contract's inputs and outputs: scores are the softmax of the mean of a 1x1
# convolution of 3 to 2 channels, weights (1, 0, -1) / 64 and (0, 1, 0) / 64. tests/verbs/test_doctor.py writes it anew.
PROBE_MODEL = b64decode(
    "CAo6nQQKHAoGaW1hZ2VzEgFmIgRDYXN0KgkKAnRvGAGgAQIKJAoBZhIBdCIJVHJhbnNwb3NlKhEKBHBlcm1AAEADQAFAAqABBwomCgF0CgF3EgFj"
    "IgRDb252KhUKDGtlcm5lbF9zaGFwZUABQAGgAQcKGQoBYxIBcCIRR2xvYmFsQXZlcmFnZVBvb2wKFAoBcBIGbG9naXRzIgdGbGF0dGVuCi8KBmxv"
    "Z2l0cxIGc2NvcmVzIgdTb2Z0bWF4KhQKBGF4aXMY////////////AaABAgoaCgVzaXplcxIHd2luZG93cyIISWRlbnRpdHkKKAoGc2NvcmVzCgRh"
    "eGVzEg13aW5kb3dfc2NvcmVzIglVbnNxdWVlemUSBXRyaWFsKicIAggDCAEIARABQgF3ShgAAIA8AAAAAAAAgLwAAAAAAACAPAAAAAAqHAgCEAdC"
    "BGF4ZXNKEAEAAAAAAAAAAgAAAAAAAABaIwoGaW1hZ2VzEhkKFwgCEhMKAxIBTgoDEgFICgMSAVcKAggDWhgKBXNpemVzEg8KDQgHEgkKAxIBTgoC"
    "CAJiGQoGc2NvcmVzEg8KDQgBEgkKAxIBTgoCCAJiGQoGbG9naXRzEg8KDQgBEgkKAxIBTgoCCAJiGgoHd2luZG93cxIPCg0IBxIJCgMSAU4KAggC"
    "YigKDXdpbmRvd19zY29yZXMSFwoVCAESEQoDEgFOCgIIAQoCCAEKAggCQgQKABAS"
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    state: `note` is for what works, but not as it could; told: what was found; mend: what to do, empty where nothing;
    facts: the same for programs.
    """

    name: str
    told: str
    state: State = "ok"
    mend: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def check_machine(host: str, port: int) -> Iterator[Finding]:
    """Yield what there is to say of this machine and this environment."""
    yield _versions()
    yield _runtime()
    yield from _devices()
    yield _processor()
    yield _memory()
    yield _open_files(ServerLimits.max_connections)
    yield _port(host, port)


def _versions() -> Finding:
    found = {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    return Finding("versions", ", ".join(f"{name} {version}" for name, version in found.items()), facts=found)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _runtime() -> Finding:
    """Find the one onnxruntime; two of them overwrite each other."""
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name)) != "not installed"}
    told = ", ".join(f"{name} {version}" for name, version in found.items()) or "none"
    try:
        onnx.import_runtime()
    except PreluNetError as error:
        return Finding("onnxruntime", told, "wrong", str(error), found)
    return Finding("onnxruntime", told, facts=found)


def _devices() -> Iterator[Finding]:
    """Try each device with a model that every one of them can run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trial.onnx"
        path.write_bytes(PROBE_MODEL)
        yield _cpu(path)
        yield _openvino(path)
        yield _cuda(path)


def _cpu(path: Path) -> Finding:
    failure = _failure(partial(onnx.load_on_cpu, path), "fp32")
    if failure:
        return Finding("device cpu", "does not compute", "wrong", failure, {"precisions": []})
    return Finding("device cpu", "computes in fp32", facts={"precisions": ["fp32"]})


def _openvino(path: Path) -> Finding:
    if _version("openvino") == "not installed":
        told = "openvino is not installed; it computes faster on a CPU"
        return Finding("device openvino", told, "note", install_hint("openvino"), {"precisions": []})
    failures: dict[openvino.CpuPrecision, str] = {
        precision: _failure(partial(openvino.load, path, precision), precision) for precision in openvino.HINTS
    }
    precisions = [precision for precision, failure in failures.items() if not failure]
    facts = {"precisions": precisions, "version": _version("openvino")}
    if "fp32" not in precisions:
        return Finding("device openvino", "does not compute", "wrong", failures["fp32"], facts)
    told = f"computes in {' and '.join(precisions)}"
    return Finding("device openvino", told if "bf16" in precisions else f"{told}; this CPU knows no bf16", facts=facts)


def _cuda(path: Path) -> Finding:
    """Try every GPU that is visible."""
    gpus = visible_gpus()
    try:
        known = onnx.has_cuda_provider()
    except PreluNetError:  # told above
        known = False
    facts: dict[str, Any] = {"visible": gpus, "names": []}
    if not gpus:
        told = "no GPU is visible" + ("; this onnxruntime could use one" if known else "")
        return Finding("device cuda", told, facts=facts)
    if not known:
        told = f"{gpus} GPUs are visible, but this onnxruntime knows no CUDA"
        return Finding("device cuda", told, "note", f"in a fresh environment: {install_hint('gpu')}", facts)
    failures = []
    for gpu in range(gpus):
        if failure := _failure(partial(_on_gpu, path, gpu, facts["names"]), "tf32"):
            failures.append(f"GPU {gpu}: {failure}")
    if failures:
        return Finding("device cuda", f"{len(failures)} of {gpus} do not compute", "wrong", "; ".join(failures), facts)
    return Finding("device cuda", f"{gpus} compute: {', '.join(facts['names'])}", facts=facts)


def _on_gpu(path: Path, gpu: int, names: list[str]) -> LoadedModel:
    loaded, _ = onnx.load_on_cuda(path, gpu=gpu)
    names.append(str(loaded.packages.get("gpu", "")))
    return loaded


def _failure(load: Callable[[], LoadedModel], precision: str) -> str:
    """Return why the trial model cannot be loaded or does not give its scores; empty when all is well."""
    images = np.zeros((1, 3, 4, 3), np.uint8)
    images[..., 0], images[..., 1] = 64, 128
    try:
        loaded = load()
        scores = np.asarray(loaded.compute(loaded.stage(images, np.array([[3, 4]], np.int64)))[0], np.float64)
    except PreluNetError as error:
        return str(error)
    except Exception as error:  # the runtimes' own classes
        return f"{type(error).__name__}: {error}"
    expected = np.exp([[1.0, 2.0]]) / np.exp([[1.0, 2.0]]).sum()
    off = float(np.abs(scores - expected).max())
    if not off <= tolerance_of(precision).scores:
        return f"a trial of two classes is off by {off:.1e}: this device, or its driver, computes wrongly"
    return ""


def _processor() -> Finding:
    there, usable = os.cpu_count() or 1, cores()
    told = f"{usable} of {there} cores can be used" if usable < there else f"{there} cores"
    return Finding("processor", told, facts={"cores": there, "usable": usable})


def _memory() -> Finding:
    size = machine_memory()
    return Finding("memory", f"{format_bytes(size)} for this process", facts={"bytes": size})


def _open_files(connections: int) -> Finding:
    """Compare the limit of open files with what a server's connections take; it raises the soft one by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {"soft": soft, "hard": hard}
    told = f"{soft}, can be raised to {'any' if hard == resource.RLIM_INFINITY else hard}"
    if hard != resource.RLIM_INFINITY and hard < connections + RESERVED_FILES:
        room = hard - RESERVED_FILES  # where there is none, `serve` does not start
        smaller = f" or serve with --max-connections {room} instead of {connections}" if room > 0 else ""
        mend = f"raise it (ulimit -Hn){smaller}"
        return Finding("open files", told, "note", mend, facts)
    return Finding("open files", told, facts=facts)


def _port(host: str, port: int) -> Finding:
    facts = {"host": host, "port": port}
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: a connection that just ended is none
            trial.bind(address)
    except OSError as error:
        mend = "serve with another --port, unless it is your server that has it"
        return Finding("port", f"{host}:{port}: {error.strerror or error}", "note", mend, facts)
    return Finding("port", f"{host}:{port} is free", facts=facts)


def check_model(path: Path, placement: Placement, estimate_memory: Callable[[Session], int]) -> Finding:
    """Load a model, run its golden images and tell how much memory serving it takes. foretold: bytes of that."""
    try:
        session = open_with_placement(path, placement, preallocate=True)
        deviations = list(_deviations(session))
    except PreluNetError as error:
        return Finding("model", f"{path}: cannot be served", "wrong", str(error))
    need, there = estimate_memory(session), machine_memory()
    facts = {
        "sha256": session.model_sha256,
        "architecture": session.contract.name,
        "circumstances": session.circumstances.to_json(),
        "deviations": [{**asdict(each), "passed": each.passed} for each in deviations],
        "memory": need,
    }
    told = f"{path}: {session.contract.name} on {session.circumstances}; serving it takes up to {format_bytes(need)}"
    if not deviations:
        return Finding("model", f"{told}; it has no golden images, so nothing is checked", "note", _verify(), facts)
    worst = max(each.scores for each in deviations)
    if not all(each.passed for each in deviations):
        mend = f"do not trust this device or runtime version with this model; more is told by: {_verify()}"
        return Finding("model", f"{told}; its golden images are off by {worst:.1e}", "wrong", mend, facts)
    told += f"; golden images off by {worst:.1e}"
    if need > there:
        return Finding("model", told, "note", f"this machine has {format_bytes(there)}: give --memory-limit", facts)
    return Finding("model", told, facts=facts)


def _verify() -> str:
    return "prelunet verify MODEL.onnx"


def _deviations(session: Session) -> Iterator[Deviation]:
    contract: ModelContract = session.contract
    precisions = (contract.precision, session.circumstances.precision)
    coarser = max(precisions, key=lambda precision: tolerance_of(precision).scores)
    for golden in contract.golden:
        size = (golden.height, golden.width)
        outputs = session.run(golden_image(*size)[None], np.array([size], np.int64))
        yield deviation("alone", size, outputs, 0, golden.scores, golden.logits, precision=coarser)


def check_server(address: str, timeout: float) -> Iterator[Finding]:
    """Ask a running server for its health and its models, and tell how long a round trip takes."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from prelunet.evaluator.client import Client, RetryPolicy

    options = [("grpc.enable_http_proxy", 0)]  # the address is meant as it stands, as the client has it
    with grpc.insecure_channel(address, options=options) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        seconds = []
        try:
            for _ in range(1 + _ROUND_TRIPS):
                begun = time.perf_counter()
                status = check(health_pb2.HealthCheckRequest(), timeout=timeout).status
                seconds.append(time.perf_counter() - begun)
        except grpc.RpcError as error:
            told = f"{address}: {error.code().name}: {error.details()}"
            yield Finding("server", told, "wrong", "is it running there? prelunet serve --model NAME=MODEL.onnx")
            return
    name, trip = health_pb2.HealthCheckResponse.ServingStatus.Name(status), statistics.median(seconds[1:])
    told, facts = f"{address}: {name}, a round trip takes {1000 * trip:.2f} ms", {"health": name, "seconds": trip}
    if name != "SERVING":
        yield Finding("server", told, "wrong", "it is loading its models, or stopping; its log tells", facts)
        return
    yield Finding("server", told, facts=facts)
    try:
        with Client(address, timeout=timeout, retries=RetryPolicy.none()) as client:
            models = client.models()
    except PreluNetError as error:
        yield Finding("served models", "cannot be asked", "wrong", str(error))
        return
    listed = ", ".join(f"{model.name} ({model.architecture}, sha256 {model.sha256[:12]})" for model in models)
    yield Finding("served models", listed, facts={"models": {model.name: model.sha256 for model in models}})
