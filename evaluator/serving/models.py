"""The models of a server: loaded, run once, and looked up by name and version."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from weakref import WeakSet

import numpy as np

from ..engine.batching import BatchRules
from ..engine.load import add_lanes, open_with_placement, self_check
from ..engine.memory import cpu_rules, fit_rules
from ..engine.session import Placement, Session
from ..engine.shape_buckets import ShapeBuckets
from ..errors import DeviceLost, Interrupted, ModelNotFound
from ..imaging.limits import DecodeLimits
from .observability.metrics import Metrics, ModelMetrics
from .options import ModelFile, QueueOptions
from .scheduling.admission import AdmissionController
from .scheduling.device import ServedDevice, device_name
from .scheduling.model import ServedModel, shape_buckets_of

# Pixels of a server's largest batch: four times the cost of switching plans (model C in fp16), and a wait of some 50 ms
# for the next caller. Assumed, not measured here.
MAX_BATCH_PIXELS = 2**23
# For which each lane has room: 362x362 pixels, or 256 windows (a view of 64x85 of the demo's net has 150).
LANE_PIXELS, LANE_WINDOWS = 2**17, 2**8
# Of batches that alternate on a GPU. Simulated (benchmarks/results/gpu-options.md): with 8 a server of net A answers a
# quarter fewer calls, with 32 an eighth more, and each takes a copy of the weights and 0.8 s at the start.
PREPARED_SHAPES = 16

log = logging.getLogger(__name__)


def load_model(file: ModelFile, placement: Placement, stopped: Callable[[], bool] = lambda: False) -> Session:
    """Load a model and compare its golden images; on a GPU also run each canvas of its shape buckets.

    stopped: called between batches; True cancels. Raises Interrupted then, and the errors of `open_with_placement`.
    """
    session = open_with_placement(file.path, replace(placement, prepared_shapes=PREPARED_SHAPES))
    if (shape_buckets := shape_buckets_of(session)) is None:
        self_check(session, file.path.name, whole=True)
        add_lanes(session, file.path)
        session.rules = serving_rules(session, session.placement.memory)
    else:  # on a GPU, where opening has run the self-check; batches are smaller than in validation
        session.rules = serving_rules(session)
        log.info("model %s: room for %d shapes of batches at once", file.name, session.prepared_shapes)
        start = time.monotonic()
        for done, total in warm_up(session, shape_buckets):
            if stopped():
                raise Interrupted(f"loading of model '{file.name}' was cancelled during its warm-up")
            if 10 * done // total > 10 * (done - 1) // total:
                seconds = time.monotonic() - start
                log.info("model %s: warm-up, %d of %d batches in %.0f s", file.name, done, total, seconds)
    return session


def serving_rules(session: Session, memory: int | None = None) -> BatchRules:
    """Return the rules of a server's batches: smaller batches on a GPU, to shorten the wait behind them.

    memory: of which they take an eighth on a CPU, so that there is room for queues and other models.
    """
    rules, contract = session.rules, session.contract
    if not session.circumstances.on_gpu:
        device, precision, lanes = session.placement.device, session.circumstances.precision, session.lanes
        if memory is not None:
            rules = cpu_rules(contract, None, session.model_bytes, device=device, precision=precision)
        if lanes > 1:  # together they take no more memory than the largest batch
            pixels, windows = max(rules.max_pixels, lanes * LANE_PIXELS), max(rules.max_windows, lanes * LANE_WINDOWS)
            rules = replace(rules, max_pixels=pixels, max_windows=windows)
        runtimes = 2 if lanes > 1 else 1  # that keep the memory of such a batch
        return rules if memory is None else fit_rules(contract, memory / 8 / runtimes, rules, precision, device)
    if rules.max_pixels <= MAX_BATCH_PIXELS:
        return rules
    share = MAX_BATCH_PIXELS / rules.max_pixels
    return replace(rules, max_pixels=MAX_BATCH_PIXELS, max_windows=max(1, int(share * rules.max_windows)))


def warm_up(session: Session, shape_buckets: ShapeBuckets) -> Iterator[tuple[int, int]]:
    """Run each canvas, the largest batch first, so that the others fit into the memory regions that it allocates.

    Yields after each batch their number so far and the total. Raises the errors of `Session.run`.
    """
    rules, contract = session.rules, session.contract

    def max_rows(height: int, width: int) -> int:
        return rules.max_rows(height * width, math.prod(contract.window_grid(height, width)))

    shapes = shape_buckets.warm_up_shapes(max_rows)
    for done, (rows, height, width) in enumerate(shapes, 1):
        session.run(np.zeros((rows, height, width, 3), np.uint8), np.full((rows, 2), (height, width), np.int64))
        yield done, len(shapes)


class Models:
    """The loaded versions of all models, by name, in the order in which the models were loaded. Owns their devices.

    on_lost: called once for each device, in any thread, when it is lost; its calls fail from then on. on_change: called
    each time that a version is added or removed. All methods but `close` belong to the event loop's thread.
    """

    def __init__(
        self,
        loaded: Iterable[tuple[ModelFile, Session]],
        limits: DecodeLimits,
        queue: QueueOptions = QueueOptions(),
        metrics: Metrics | None = None,
        on_lost: Callable[[DeviceLost], object] = lambda _: None,
    ) -> None:
        self.metrics = metrics or Metrics()
        self.metrics.limits.labels("queue-views").set(queue.max_views)
        self.metrics.limits.labels("queue-bytes").set(queue.max_bytes)
        self.on_change: list[Callable[[], object]] = []
        self._limits, self._queue, self._on_lost = limits, queue, on_lost
        self._devices: dict[str, ServedDevice] = {}
        self._admissions: dict[str, AdmissionController] = {}  # by name: versions share the limits of their model
        self._by_name: dict[str, dict[str, ServedModel]] = {}
        self._sessions = WeakSet[Session]()
        for file, session in loaded:
            self.add(file, session)

    def add(self, file: ModelFile, session: Session) -> None:
        """Serve a version from the next call on; it replaces a loaded one of the same number."""
        device = device_name(session.placement)
        if device not in self._devices:
            self._devices[device] = ServedDevice(device, self._queue, self._on_lost)
        self._devices[device].executor.ensure_threads(session.lanes)
        metrics = ModelMetrics(self.metrics, file.name)
        if file.name not in self._admissions:
            self._admissions[file.name] = AdmissionController(file.name, self._queue, metrics)
        self.remove(file.name, str(file.version))
        self._by_name.setdefault(file.name, {})[str(file.version)] = ServedModel(
            file, session, self._devices[device].waiting, self._admissions[file.name], metrics,
            limits=self._limits, max_view_pixels=self._queue.max_view_pixels,
        )  # fmt: skip
        self._sessions.add(session)
        labels = _info_labels(file.name, file.version, session)
        self.metrics.model_info.labels(*labels).set(1)
        log.info("model %s/%s is loaded: sha256 %s, architecture %s, %s, %s", *labels)
        self._notify()

    def remove(self, name: str, version: str) -> None:
        """Stop serving a version if it is loaded. Its memory is freed when the last call that uses it has ended."""
        if (removed := self._by_name.get(name, {}).pop(version, None)) is not None:
            self.metrics.model_info.remove(*_info_labels(name, removed.version, removed.session))
            if not self._by_name[name]:
                del self._by_name[name]
            self._notify()

    def _notify(self) -> None:
        for listener in self.on_change:
            listener()

    def get(self, name: str) -> ServedModel:
        """Return the newest version of the model NAME, or the version of NAME/VERSION; without a name, of the only one.

        Raises ModelNotFound, which lists what there is.
        """
        if not name and len(self._by_name) == 1:
            (name,) = self._by_name
        name, separator, version = name.partition("/")
        versions = self._by_name.get(name, {})
        if not separator and versions:
            return max(versions.values(), key=lambda each: each.version)
        if version in versions:
            return versions[version]
        if versions:
            raise ModelNotFound(f"model '{name}' has no loaded version '{version}'. Loaded: {', '.join(versions)}")
        if not self._by_name:
            raise ModelNotFound("no model is served: all are unloaded")
        problem = (
            f"no model '{name}' is served"
            if name
            else "several models are served, so a name is needed (`model`, or `--name` of prelunet classify)"
        )
        raise ModelNotFound(f"{problem}. There are: {', '.join(self._by_name)}")

    def has(self, name: str) -> bool:
        name, separator, version = name.partition("/")
        return version in self._by_name.get(name, {}) if separator else name in self._by_name

    def all(self) -> list[ServedModel]:
        return [self.get(name) for name in self._by_name]

    def versions(self, name: str) -> list[ServedModel]:
        return sorted(self._by_name.get(name, {}).values(), key=lambda each: -each.version)

    def sessions(self) -> list[Session]:
        """Return the sessions in memory, with those that are only used by calls in flight."""
        return list(self._sessions)

    def close(self) -> None:
        for device in self._devices.values():
            device.close()


def _info_labels(name: str, version: int, session: Session) -> tuple[str, ...]:
    """Return the labels of `Metrics.model_info`."""
    circumstances = session.circumstances
    return (
        name, str(version), session.model_sha256, session.contract.name, circumstances.provider, circumstances.precision
    )  # fmt: skip
