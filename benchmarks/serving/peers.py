"""The servers that run.py compares, each started as an engineer would start it.

Ours is `prelunet serve` of this checkout. Triton and MLServer need their own environments, because their packages
conflict with ours; options name the Python of each:

    python3.11 -m venv triton && triton/bin/pip install nvidia-pytriton==0.7.0 onnxruntime pillow
    python3.11 -m venv mlserver && mlserver/bin/pip install mlserver==1.7.1 onnxruntime pillow

What they serve is in peer_classifier.py, peer_triton.py and peer_mlserver.py. All listen on loopback only.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.common.results import ROOT
from benchmarks.common.server_process import PRELUNET, PreluNetServer, ServerProcess, free_port
from benchmarks.serving.load import open_channel
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.pb.inference import inference_pb2 as pb
from prelunet.evaluator.pb.inference import inference_pb2_grpc as pb_grpc

HERE = Path(__file__).parent
TLS = ROOT / "tests" / "data" / "tls"
NULL = (sys.executable, "-m", "benchmarks.serving.null")
ECHO = (sys.executable, "-m", "benchmarks.serving.echo")
START_SECONDS, STOP_SECONDS = 120.0, 20.0
TOP = 5  # classes that every server returns for an image
BATCH = 8  # maximum batch of a peer: the images of 16 clients allow two batches at once
MLSERVER_WAIT = 0.002  # seconds that MLServer waits to fill a batch, our own maximum; must be more than 0

# Run by a peer's Python: where its packages are, and which.
_PACKAGES = ("nvidia-pytriton", "mlserver", "onnxruntime", "pillow", "numpy", "grpcio", "protobuf")
_QUESTION = f"""
import importlib.metadata, json, platform, sys, sysconfig
installed = {{one.name.lower(): one.version for one in importlib.metadata.distributions()}}
print(json.dumps({{"folder": sysconfig.get_path("purelib"), "python": platform.python_version(),
                  "packages": {{name: installed[name] for name in {_PACKAGES!r} if name in installed}}}}))
"""

Json = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """One model of a peer, as peer_classifier.py reads it. crop: None for the whole image; cores: those it may use.

    A batch runs on one thread, and as many batches at once as there are cores. On the demo net this gave Triton twice
    the throughput of one batch on all cores, whose threads wait for each other more than they compute.
    """

    model: Path
    scale: int
    crop: int | None
    mirror: bool
    cores: int
    null: bool = False

    def write(self, folder: Path, instances: int = 1) -> None:
        """Write spec.json beside the code that reads it. instances: number that share the cores."""
        folder.mkdir(parents=True)
        shutil.copy(HERE / "peer_classifier.py", folder)
        spec = {"model": str(self.model), "scale": self.scale, "crop": self.crop, "mirror": self.mirror}
        spec |= {"threads": 1, "decoders": self.cores // instances, "at_once": self.cores // instances}
        spec |= {"top": TOP, "null": self.null}
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")


class Contender:
    """A running server of a comparison.

    settings: for the result file; http: address of its HTTP port; tls_ca: authorities of its certificate, None without
    TLS.
    """

    def __init__(
        self,
        name: str,
        process: ServerProcess,
        settings: Mapping[str, Any],
        http: str = "",
        tls_ca: Path | None = None,
    ) -> None:
        self.name, self.process, self.settings = name, process, dict(settings)
        self.address, self.http, self.tls_ca = process.address, http, tls_ca

    def wait(self, models: Sequence[str]) -> None:
        """Wait until it is ready for these models; raises EnvironmentFault with the end of its log."""
        limit = time.monotonic() + START_SECONDS
        with open_channel(grpc, self.address, self.tls_ca) as channel:
            stub = pb_grpc.GRPCInferenceServiceStub(channel)
            waiting = list(models)
            while waiting:
                with suppress(grpc.RpcError):
                    if stub.ModelReady(pb.ModelReadyRequest(name=waiting[-1]), timeout=5).ready:
                        waiting.pop()
                        continue
                if not self.process.is_alive() or time.monotonic() > limit:
                    self.stop()
                    raise EnvironmentFault(f"{self.name} did not start: {self.process.log.strip()[-800:]}")
                time.sleep(0.1)
            metadata = stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=5)
        self.settings["server"] = f"{metadata.name} {metadata.version}"

    def stop(self) -> None:
        """Stop the process, and kill it if it does not end in time."""
        with suppress(subprocess.TimeoutExpired):
            self.process.stop(timeout=STOP_SECONDS)
        self.process.kill()


def start_ours(
    models: Mapping[str, Path],
    threads: int,
    folder: Path,
    *,
    processes: int = 1,
    null: bool = False,
    http: bool = False,
    tls: bool = False,
) -> Contender:
    """Start `prelunet serve` of this checkout.

    processes: that share the port; null: with sessions that return zeros (null.py); http: with an HTTP port; tls: with
    the certificate of the tests.
    """
    options = ["--device", "cpu", "--threads", str(threads), "--processes", str(processes), "--lame-duck", "0"]
    options += ["--http-port", "0"] * http
    if tls:
        options += ["--tls-cert", str(TLS / "server.pem"), "--tls-key", str(TLS / "server.key")]
    process = PreluNetServer(models, *options, log=folder / "prelunet.log", program=NULL if null else PRELUNET)
    own = ", ".join(
        [
            f"--processes {processes}",
            "--lame-duck 0",
            *(["--http-port 0"] * http),
            *(["--tls-cert and --tls-key"] * tls),
        ]
    )
    settings = {"threads": threads, "options": f"defaults of prelunet serve, but {own}"}
    name = f"prelunet{', null' * null}"
    return Contender(name, process, settings, process.http, TLS / "ca.pem" if tls else None)


def start_echo(answer: bytes, folder: Path) -> Contender:
    """Start a bare grpc.aio server (echo.py) that answers every Classify with these bytes of a message."""
    file = folder / "answer.bin"
    file.write_bytes(answer)
    process = PreluNetServer({}, log=folder / "echo.log", program=(*ECHO, str(file)))  # ignores the other arguments
    return Contender("echo", process, {"options": "none"})


def start_triton(python: Path, models: Mapping[str, Spec], folder: Path) -> Contender:
    """Start Triton with its Python backend and dynamic batching; python: from an environment with nvidia-pytriton."""
    found = _inspect(python, "nvidia-pytriton")
    packages = Path(found["folder"])
    parts = packages / "pytriton" / "tritonserver"
    backend, repository = folder / "backends" / "python", folder / "models"
    shutil.copytree(parts / "backends" / "python", backend)
    minor = found["python"].rpartition(".")[0]
    shutil.copy(parts / "python_backend_stubs" / minor / "triton_python_backend_stub", backend)
    for name, spec in models.items():
        version = repository / name / "1"
        spec.write(version, instances=spec.cores)
        shutil.copy(HERE / "peer_triton.py", version / "model.py")
        (repository / name / "config.pbtxt").write_text(_triton_config(name, spec.cores), encoding="utf-8")
    port = free_port()
    command = [str(parts / "bin" / "tritonserver"), f"--model-repository={repository}"]
    command += [f"--backend-directory={folder / 'backends'}", "--allow-http=false", "--allow-metrics=false"]
    command += ["--grpc-address=127.0.0.1", f"--grpc-port={port}"]
    environment = _environment(python)
    environment["LD_LIBRARY_PATH"] = str(packages / "nvidia_pytriton.libs")
    settings = {
        **found["packages"],
        "python": found["python"],
        "backend": "python, onnxruntime inside",
        "dynamic_batching": f"on, max_batch_size {BATCH}, no queue delay",
        "instances": next(iter(models.values())).cores,
        "threads of each": 1,
    }
    process = ServerProcess(command, folder / "triton.log", address=f"127.0.0.1:{port}", env=environment)
    return Contender("triton", process, settings)


def _triton_config(name: str, instances: int) -> str:
    outputs = ", ".join(
        f'{{ name: "{output}" data_type: {kind} dims: [ {TOP} ] }}'
        for output, kind in (("class_index", "TYPE_INT32"), ("score", "TYPE_FP32"))
    )
    return (
        f'name: "{name}"\nbackend: "python"\nmax_batch_size: {BATCH}\ndynamic_batching {{ }}\n'
        'input [ { name: "images" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
        f"output [ {outputs} ]\ninstance_group [ {{ kind: KIND_CPU count: {instances} }} ]\n"
    )


def start_mlserver(python: Path, models: Mapping[str, Spec], folder: Path) -> Contender:
    """Start MLServer with our runtime and adaptive batching; python: from an environment with mlserver."""
    found = _inspect(python, "mlserver")
    port = free_port()
    common = {"host": "127.0.0.1", "grpc_port": port, "http_port": free_port(), "metrics_port": free_port()}
    server = {**common, "parallel_workers": 0, "debug": False, "grpc_max_message_length": 64 * 2**20}
    (folder / "settings.json").write_text(json.dumps(server), encoding="utf-8")
    for name, spec in models.items():
        spec.write(folder / name)
        shutil.copy(HERE / "peer_mlserver.py", folder / name)
        model = {
            "name": name,
            "implementation": "peer_mlserver.Runtime",
            "max_batch_size": BATCH,
            "max_batch_time": MLSERVER_WAIT,
            "parameters": {"uri": str(folder / name)},
        }
        (folder / name / "model-settings.json").write_text(json.dumps(model), encoding="utf-8")
    settings = {
        **found["packages"],
        "python": found["python"],
        "runtime": "a class of ours, onnxruntime inside",
        "adaptive batching": f"on, max_batch_size {BATCH}, max_batch_time {MLSERVER_WAIT}",
        "parallel_workers": 0,
        "batches at once": next(iter(models.values())).cores,
        "threads of each": 1,
    }
    command = [str(python.parent / "mlserver"), "start", str(folder)]
    address = f"127.0.0.1:{port}"
    process = ServerProcess(command, folder / "mlserver.log", address=address, env=_environment(python))
    return Contender("mlserver", process, settings)


def _environment(python: Path) -> dict[str, str]:
    """Return an environment in which a peer finds only its own packages."""
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment["PATH"] = os.pathsep.join([str(python.parent), environment.get("PATH", "")])
    environment["ORT_DISABLE_TELEMETRY"] = "1"
    return environment


def _inspect(python: Path, package: str) -> Json:
    """Return folder, version and packages of a peer's environment; raises EnvironmentFault if a package is missing."""
    try:
        output = subprocess.run(
            [str(python), "-c", _QUESTION], capture_output=True, text=True, check=True, env=_environment(python)
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise EnvironmentFault(f"the {python.name} of its environment does not run ({type(error).__name__})") from error
    found: Json = json.loads(output)
    missing = {package, "onnxruntime", "pillow"} - set(found["packages"])
    if missing:
        raise EnvironmentFault(f"its environment has no {', '.join(sorted(missing))}: install it with pip")
    return found


Starter = Callable[[Path, Mapping[str, Spec], Path], Contender]
STARTERS: Mapping[str, Starter] = {"triton": start_triton, "mlserver": start_mlserver}
