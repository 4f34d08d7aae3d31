"""The checks of `prelunet doctor`: one finding for each thing that can be wrong with a machine."""

import importlib.metadata
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..engine.load import open_with_placement, visible_gpus
from ..engine.runtimes import RUNTIMES, onnx
from ..engine.session import Placement, Session
from ..engine.verify import Deviation, verify
from ..errors import PreluNetError, install_hint
from ..machine import format_bytes, machine_memory
from ..rpc.credentials import Credentials
from ..serving.memory import serving_memory
from ..serving.options import ModelFile, ServeOptions

State = Literal["ok", "note", "wrong"]

_PACKAGES = ("prelunet", "numpy", "pillow", "grpcio", "protobuf", "prometheus-client")
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")  # of one import package


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    message: what was found; state: `note` means that it is absent, or could work better; fix: how to fix it, empty if
    there is nothing to fix; facts: the findings for programs.
    """

    name: str
    message: str
    state: State = "ok"
    fix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "message": self.message, "state": self.state, "fix": self.fix, "facts": self.facts}


def check_machine(host: str, port: int, device: str = "auto") -> Iterator[Finding]:
    """Check this machine and its environment. device: requested; it is wrong if that is not there."""
    found = {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    yield Finding("versions", ", ".join(f"{name} {version}" for name, version in found.items()), facts=found)
    yield _runtime()
    for finding in _devices():
        missing = finding.name == f"device {device}" and finding.state == "note"
        yield replace(finding, state="wrong", fix=finding.fix or "Choose another --device") if missing else finding
    size = machine_memory()
    yield Finding("memory", f"{format_bytes(size)} for this process", facts={"bytes": size})
    yield _port(host, port)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _runtime() -> Finding:
    """Check that exactly one onnxruntime is installed; two overwrite each other's files."""
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name)) != "not installed"}
    message = ", ".join(f"{name} {version}" for name, version in found.items()) or "none"
    try:
        onnx.import_runtime()
    except PreluNetError as error:
        return Finding("onnxruntime", message, "wrong", str(error), found)
    return Finding("onnxruntime", message, facts=found)


def _devices() -> Iterator[Finding]:
    """Look for what each device besides onnxruntime on a CPU needs; whether it computes, only a model shows."""
    for name, runtime in RUNTIMES.items():
        if runtime.gpu:
            yield _cuda()
        elif (package := runtime.distribution) is not None:
            facts = {"version": _version(package)}
            if facts["version"] == "not installed":
                message = f"{package} is not installed; it is {runtime.benefit}"
                yield Finding(f"device {name}", message, "note", install_hint(package), facts)
            else:
                yield Finding(f"device {name}", f"{facts['version']}; to try it: --model", facts=facts)


def _cuda() -> Finding:
    gpus = visible_gpus()
    try:
        has_cuda = onnx.has_cuda_provider()
    except PreluNetError:  # reported by _runtime
        has_cuda = False
    facts = {"visible": gpus}
    if not gpus:
        message = "no GPU is visible" + ("; this onnxruntime could use one" if has_cuda else "")
        return Finding("device cuda", message, "note", facts=facts)
    if not has_cuda:
        message = f"{gpus} GPUs are visible, but this onnxruntime does not support CUDA"
        return Finding("device cuda", message, "note", f"in a fresh environment: {install_hint('gpu')}", facts)
    return Finding("device cuda", f"{gpus} GPUs are visible; to try one: --model", facts=facts)


def _port(host: str, port: int) -> Finding:
    facts = {"host": host, "port": port}
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: ignore connections just closed
            trial.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: of a host name
        fix = "serve with another --port or --host, unless your own server is using this one"
        return Finding("port", f"{host}:{port}: {getattr(error, 'strerror', None) or error}", "note", fix, facts)
    return Finding("port", f"{host}:{port} is free", facts=facts)


def check_model(path: Path, placement: Placement) -> Iterator[Finding]:
    """Load a model, run its golden images, and estimate the memory for serving it."""
    try:
        session = open_with_placement(path, placement, preallocate=True, check=False)
        deviations = verify(session) if session.contract.golden else []
    except PreluNetError as error:
        yield Finding("model", f"{path}: cannot be served", "wrong", str(error))
    else:
        yield _model(path, session, deviations)


def _model(path: Path, session: Session, deviations: Sequence[Deviation]) -> Finding:
    need = serving_memory([session], ServeOptions((ModelFile("model", path),))).total
    available = machine_memory()
    facts = {
        "sha256": session.model_sha256,
        "architecture": session.contract.name,
        "circumstances": session.circumstances.to_json(),
        "deviations": [each.to_json() for each in deviations],
        "memory": need,
    }
    message = f"{path}: {session.contract.name} on {session.circumstances}; serving it takes up to {format_bytes(need)}"
    if not deviations:
        fix = "export or adopt it again: its file will have golden images then"
        return Finding("model", f"{message}; it has no golden images, so it was not checked", "note", fix, facts)
    worst = max(each.scores for each in deviations)
    if not all(each.passed for each in deviations):
        fix = "do not use this device or runtime version with this model; for details: prelunet verify MODEL.onnx"
        return Finding("model", f"{message}; its golden images are off by {worst:.1e}", "wrong", fix, facts)
    message += f"; golden images off by {worst:.1e}"
    if need > available:
        fix = f"this machine has {format_bytes(available)}: give --memory-limit"
        return Finding("model", message, "note", fix, facts)
    return Finding("model", message, facts=facts)


def check_server(address: str, timeout: float, credentials: Credentials) -> Iterator[Finding]:
    """Check a running server's health and models."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from ..client import Client
    from ..client.channel import open_channel
    from ..rpc.status import error_from

    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]  # connect directly, as the client does
    with open_channel(grpc, address, credentials.of_channel(), options) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            status = check(health_pb2.HealthCheckRequest(), timeout=timeout).status
        except grpc.RpcError as error:
            yield Finding("server", f"{address}: {error.code().name}", "wrong", str(error_from(error, address)))
            return
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    message, facts = f"{address}: {name}", {"health": name}
    if name != "SERVING":
        yield Finding("server", message, "wrong", "it is loading its models or stopping; see its log", facts)
        return
    yield Finding("server", message, facts=facts)
    try:
        with Client(address, timeout=timeout, retries=False, credentials=credentials) as client:
            models = client.models()
    except PreluNetError as error:
        yield Finding("served models", "cannot be listed", "wrong", str(error))
        return
    listed = ", ".join(f"{model.name} ({model.architecture}, sha256 {model.sha256[:12]})" for model in models)
    yield Finding("served models", listed, facts={"models": {model.name: model.sha256 for model in models}})
