"""The models of a server: names, sessions, and that each has run once before anybody is told that it is ready."""

import logging
import time
from collections.abc import Callable, Iterable

from prelunet.evaluator.engine.load import open_with_placement, self_check
from prelunet.evaluator.engine.session import Placement, Session
from prelunet.evaluator.errors import DeviceLost, Interrupted, ModelNotFound
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.serving.classifier import Classifier
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import ModelFile, QueueOptions
from prelunet.evaluator.serving.scheduling.device import ServedDevice, device_name
from prelunet.evaluator.serving.scheduling.warm_up import serving_rules, shape_buckets_of, warm_up

log = logging.getLogger(__name__)


def _ignore(_: DeviceLost) -> None:
    """Do nothing; a server stops instead."""


def load_models(
    files: Iterable[ModelFile], placement: Placement, stopped: Callable[[], bool] = lambda: False
) -> list[tuple[ModelFile, Session]]:
    """Load each model and run it once, on a GPU with every batch of its ladder, where it has one; all or none.

    stopped: asked between batches whether nobody wants it any more. Raises what `open_with_placement` raises, and Interrupted.
    """
    return [(file, _loaded(file, placement, stopped)) for file in files]


def _loaded(file: ModelFile, placement: Placement, stopped: Callable[[], bool]) -> Session:
    session = open_with_placement(file.path, placement)
    if (shape_buckets := shape_buckets_of(session)) is None:
        self_check(session, file.path.name)
    else:  # it has run; the largest batch is the ladder's, and smaller than that of a validation
        session.rules = serving_rules(session)
        begun = time.monotonic()

        def told(done: int, of: int) -> None:
            if stopped():
                raise Interrupted(f"model '{file.name}' was not needed any more while it was warmed up")
            if 10 * done // of > 10 * (done - 1) // of:
                seconds = time.monotonic() - begun
                log.info("model %s: %d of %d batches ran once, %.0f s", file.name, done, of, seconds)

        warm_up(session, shape_buckets, told)
    return session


class Models:
    """What is served, by name, in the order given. Owns the threads that decode and compute for all of it.

    on_lost: called once, in any thread, when a device gives nothing but errors from now on; calls fail until then.
    """

    def __init__(
        self,
        loaded: Iterable[tuple[ModelFile, Session]],
        limits: DecodeLimits,
        queue: QueueOptions = QueueOptions(),
        metrics: Metrics | None = None,
        on_lost: Callable[[DeviceLost], None] = _ignore,
    ) -> None:
        self.metrics = metrics or Metrics()
        self._devices: dict[str, ServedDevice] = {}
        self._by_name: dict[str, Classifier] = {}
        for file, session in loaded:
            name = device_name(session.placement)
            device = self._devices.get(name) or ServedDevice(name, queue, on_lost)
            self._devices[name] = device
            told = self.metrics.of_model(file.name, session)
            self._by_name[file.name] = Classifier(
                file.name, file.path.name, session, device, metrics=told, limits=limits, queue=queue
            )

    def get(self, name: str) -> Classifier:
        """Return the model of that name; of no name the only one. Raises ModelNotFound that lists what there is."""
        if not name and len(self._by_name) == 1:
            return next(iter(self._by_name.values()))
        if name not in self._by_name:
            what = (
                f"no model '{name}' is served"
                if name
                else "several models are served, so a name is needed (`model`, or `--name` of prelunet classify)"
            )
            raise ModelNotFound(f"{what}. There are: {', '.join(self._by_name)}")
        return self._by_name[name]

    def all(self) -> list[Classifier]:
        """Return every model, in the order given."""
        return list(self._by_name.values())

    def close(self) -> None:
        """Finish what waits and end all threads."""
        for classifier in self._by_name.values():
            classifier.close()
        for device in self._devices.values():
            device.close()
