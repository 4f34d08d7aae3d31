"""Load, switch and unload versions of models under the calls of 16 clients; no call may fail.

    python -m benchmarks.reliability.model_changes [--tiny] [--seed N] [--output FILE]

Two nets with different weights take turns as versions of the model `changing`, in a folder of `serve --models`: a new
version arrives and is switched to, and the oldest is deleted; every fifth time the newest is unloaded, which returns to
the one before it, and loaded again; every fifth time a second model comes and goes. The clients are plain gRPC and
never retry; half of them send single calls, a quarter streams, a quarter the Open Inference Protocol with several
images. Every score is compared with those of the stated version's net, computed in this process.

Exit codes: 0 all conditions hold, 1 one does not, 3 the time limit left the case out.
"""

import io
import itertools
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import numpy as np
from PIL import Image

from benchmarks.common.nets import MEAN, class_entries, discriminating_tensors
from benchmarks.common.results import RESULTS, circumstances, digest_of
from benchmarks.common.runner import Case, Runner, command_line
from benchmarks.common.server_process import PreluNetServer
from benchmarks.reliability.cases import Json, ServerTestBed, claim, verdict
from benchmarks.reliability.table import not_held, table
from prelunet.evaluator.architectures import architecture
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.inference import inference_pb2_grpc as oip_grpc
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.net.checkpoints import Checkpoint, write_checkpoint

PACKAGES = ("prelunet", "onnxruntime", "grpcio")
MEASURED = ("evaluator", "benchmarks/reliability/model_changes.py", "benchmarks/common/nets.py")
LIMIT = 900  # seconds
CLIENTS, CHANGES, SECONDS = 16, 50, 120.0
MAX_GROWTH_MB = 50.0
TIMEOUT = 60.0  # seconds of a call, and of a change
WARM_UP = 6  # changes before memory is first measured: the allocator keeps what the first loads took
# Largest difference between a score of the server and one computed here: batches of other sizes round otherwise. The
# scores of the two nets differ by tenths.
TOLERANCE = 1e-4
CLASSES, IMAGES = 10, 4
KINDS = ("call", "call", "stream", "inference")  # of the clients, in turn
MODEL, OTHER = "changing", "other"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the case unless the file has it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "model-changes.json", limit=LIMIT)
    parser.add_argument("--seed", type=int, default=1, help="random seed of nets and pictures")
    options = parser.parse_args(words)
    facts = {"device": "cpu", "tiny": options.tiny, "source": digest_of(*MEASURED), "seed": options.seed}
    now = {**circumstances(__file__, options, PACKAGES, words), **facts}
    runner = Runner(options.output, "model-changes", now, options.limit)
    with ServerTestBed(options.seed, tiny=options.tiny) as bed:
        runner.run([_case(bed)])
    broken = not_held(runner.data)
    code = runner.finish(table(runner.data, "Models that change"), (f"NOT held: {name}: {why}" for name, why in broken))
    return 1 if broken else code


def _case(bed: ServerTestBed) -> Case:
    changes, seconds = bed.reduced(CHANGES, 8), SECONDS if not bed.tiny else 20.0

    async def test() -> Json:
        return _measure(bed, changes, seconds)

    return claim(
        "model-changes",
        f"{CLIENTS} clients call for {seconds:g} s while versions are loaded, switched and unloaded {changes} times: "
        f"no call fails, every answer is of one whole version, memory is back within {MAX_GROWTH_MB:g} MB",
        {"clients": CLIENTS, "changes": changes, "seconds": seconds, "seed": bed.seed},
        2 * seconds,
        test,
    )


@dataclass
class _Nets:
    """Two model files, pictures, and the scores (pictures, classes) of each net for them."""

    files: list[Path]
    pictures: list[bytes]
    scores: list[np.ndarray]

    def is_of(self, version: int, picture: int, scores: Sequence[float]) -> bool:
        """Return whether these are the scores of a version, whose nets take turns."""
        return bool(np.abs(self.scores[version % 2][picture] - np.asarray(scores)).max() <= TOLERANCE)


def _write_nets(folder: Path, seed: int) -> _Nets:
    net, files = architecture("demo"), []
    for number in range(2):
        file = folder / f"net-{number}.onnx"
        checkpoint = file.with_suffix(".safetensors")
        tensors = discriminating_tensors(net, CLASSES, 2 * seed + number)
        write_checkpoint(checkpoint, Checkpoint(net, class_entries(CLASSES), MEAN, tensors))
        export_checkpoint(checkpoint, file)
        files.append(file)
    # As large as the scale, so that nothing is resized.
    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGES, 32, 40, 3), np.uint8)
    sizes = np.full((1, 2), (32, 40), np.int64)
    sessions = [open_session(file, "cpu") for file in files]
    scores = [np.stack([session.run(each[None], sizes).scores[0] for each in pixels]) for session in sessions]
    return _Nets(files, list(map(_png, pixels)), scores)


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@dataclass
class _Record:
    """What the clients saw. versions: answers by version; wrong: answers of no whole version."""

    nets: _Nets
    stop: threading.Event = field(default_factory=threading.Event)
    versions: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, version: int, answers: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Check and count an answer with the scores of each of its pictures."""
        self.versions[version] += 1
        if bad := [picture for picture, scores in answers if not self.nets.is_of(version, picture, scores)]:
            self.wrong.append(f"version {version}, pictures {bad}")

    def run(self, client: Callable[[grpc.Channel, "_Record"], None], address: str) -> None:
        """Let a client call on a connection of its own until stopped, or until a call fails."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        try:
            with grpc.insecure_channel(address, options=options) as channel:
                client(channel, self)
        except Exception as error:
            self.failures.append(f"{client.__name__}: {' '.join(str(error).split())[:300]}")


def _request(picture: bytes) -> pb.ClassifyRequest:
    return pb.ClassifyRequest(image=picture, model=MODEL, protocol="dense-32", mirror=False, top_k=CLASSES)


def _scores(response: pb.ClassifyResponse) -> list[float]:
    return [each.score for each in sorted(response.predictions, key=lambda each: each.class_index)]


def _call(channel: grpc.Channel, record: _Record) -> None:
    classify = pb_grpc.PreluNetServiceStub(channel).Classify
    for picture in itertools.cycle(range(IMAGES)):
        if record.stop.is_set():
            return
        response = classify(_request(record.nets.pictures[picture]), timeout=TIMEOUT)
        record.note(response.model.version, [(picture, _scores(response))])


def _stream(channel: grpc.Channel, record: _Record) -> None:
    def requests() -> Iterator[pb.ClassifyStreamRequest]:
        for number in itertools.count():
            if record.stop.is_set():
                return
            yield pb.ClassifyStreamRequest(id=f"{number}", request=_request(record.nets.pictures[number % IMAGES]))

    for answer in pb_grpc.PreluNetServiceStub(channel).ClassifyStream(requests()):
        if answer.HasField("error"):
            raise RuntimeError(answer.error.message)
        record.note(answer.response.model.version, [(int(answer.id) % IMAGES, _scores(answer.response))])


def _inference(channel: grpc.Channel, record: _Record) -> None:
    infer, pictures = oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer, record.nets.pictures
    raw = b"".join(len(each).to_bytes(4, "little") + each for each in pictures)
    tensor = oip.ModelInferRequest.InferInputTensor(name="images", datatype="BYTES", shape=[IMAGES])
    request = oip.ModelInferRequest(model_name=MODEL, inputs=[tensor], raw_input_contents=[raw])
    request.parameters["protocol"].string_param = "dense-32"
    request.parameters["mirror"].bool_param = False
    while not record.stop.is_set():
        response = infer(request, timeout=TIMEOUT)
        scores = np.frombuffer(response.raw_output_contents[0], "<f4").reshape(IMAGES, CLASSES)
        record.note(int(response.model_version), list(enumerate(scores.tolist())))


class _Changes:
    """Changes the folder of a server. newest: number of its newest version."""

    def __init__(self, folder: Path, nets: _Nets, address: str) -> None:
        self._folder, self._nets = folder, nets
        self._channel = grpc.insecure_channel(address)
        self._stub, self._admin = (
            pb_grpc.PreluNetServiceStub(self._channel),
            oip_grpc.GRPCInferenceServiceStub(self._channel),
        )
        self.newest = 1
        self.counts: Counter[str] = Counter()

    def make(self, number: int) -> None:
        """Make the change with this number, and wait until the server serves what it should."""
        if number % 5 == 4:
            self._admin.RepositoryModelUnload(
                oip.RepositoryModelUnloadRequest(model_name=f"{MODEL}/{self.newest}"), timeout=TIMEOUT
            )
            self._until({MODEL: self.newest - 1})
            self._admin.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name=MODEL), timeout=TIMEOUT)
            self._until({MODEL: self.newest})
            self.counts.update(unloaded=1, loaded=2, switched=2)
        elif number % 5 == 2:
            self._add(OTHER, 1)
            self._until({MODEL: self.newest, OTHER: 1})
            self._admin.RepositoryModelUnload(oip.RepositoryModelUnloadRequest(model_name=OTHER), timeout=TIMEOUT)
            shutil.rmtree(self._folder / OTHER)
            self._until({MODEL: self.newest})
            self.counts.update(unloaded=1, loaded=1)
        else:
            self.newest += 1
            self._add(MODEL, self.newest)
            self._until({MODEL: self.newest})
            shutil.rmtree(self._folder / MODEL / f"{self.newest - 2}", ignore_errors=True)
            self.counts.update(loaded=1, switched=1)

    def _add(self, name: str, version: int) -> None:
        add_version(self._folder, name, version, self._nets)

    def _until(self, served: dict[str, int]) -> None:
        end = time.monotonic() + TIMEOUT
        while (
            listed := {each.name: each.version for each in self._stub.ListModels(pb.ListModelsRequest()).models}
        ) != served:
            if time.monotonic() > end:
                raise RuntimeError(f"the server serves {listed} instead of {served}")
            time.sleep(0.05)


def add_version(folder: Path, name: str, version: int, nets: _Nets) -> None:
    """Copy a version into a folder of models; versions of odd numbers are the one net, of even numbers the other."""
    place = folder / name / f"{version}"
    place.mkdir(parents=True)
    shutil.copyfile(nets.files[version % 2], place / "model.onnx")


def _measure(bed: ServerTestBed, changes: int, seconds: float) -> Json:
    nets, folder = _write_nets(bed.folder, bed.seed), bed.folder / "models"
    add_version(folder, MODEL, 1, nets)
    options = (
        "--models",
        str(folder),
        "--device",
        "cpu",
        "--lame-duck",
        "0",
        "--log-level",
        "warning",
        "--log-format",
        "json",
    )
    record = _Record(nets)
    with PreluNetServer({}, *options, log=bed.folder / "server.log") as server, ThreadPoolExecutor(CLIENTS) as pool:
        clients = {"call": _call, "stream": _stream, "inference": _inference}
        for kind in itertools.islice(itertools.cycle(KINDS), CLIENTS):
            pool.submit(partial(record.run, clients[kind], server.address))
        try:
            made = _Changes(folder, nets, server.address)
            for number in range(WARM_UP):
                made.make(number)
            made.counts.clear()
            before, begun = _settled_mb(server), time.monotonic()
            for number in range(changes):
                made.make(number)
                time.sleep(max(0.0, begun + seconds * (number + 1) / changes - time.monotonic()))
            took = time.monotonic() - begun
            after = _settled_mb(server)
        finally:
            record.stop.set()
        pool.shutdown()
        ended = server.stop()
    return verdict(
        {
            "no_call_failed": not record.failures,
            "every_answer_is_of_one_whole_version": not record.wrong,
            "every_version_answered": len(record.versions) == made.newest,
            "memory_is_back": after - before <= MAX_GROWTH_MB,
            "no_error_in_the_log": not ended.errors,
            "exit_code_0": ended.code == 0,
        },
        answers=record.versions.total(),
        versions=len(record.versions),
        changes=dict(made.counts),
        took_seconds=round(took, 1),
        mb_before=round(before, 1),
        mb_after=round(after, 1),
        failures=record.failures[:10],
        wrong=record.wrong[:10],
    )


def _settled_mb(server: PreluNetServer) -> float:
    """Return the median of the server's memory over some seconds in which nothing changes but the calls go on."""
    samples = []
    for _ in range(15):
        time.sleep(0.2)
        samples.append(server.rss_mb())
    return sorted(samples)[len(samples) // 2]


if __name__ == "__main__":
    sys.exit(main())
