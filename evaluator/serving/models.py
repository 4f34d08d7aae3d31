"""The models of a server: loaded, run once, and looked up by name."""

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


def load_model(file: ModelFile, placement: Placement, stopped: Callable[[], bool] = lambda: False) -> Session:
    """Load a model and run it once, on a GPU with every batch shape of its shape buckets.

    stopped: called between batches; True cancels. Raises Interrupted then, and the errors of `open_with_placement`.
    """
    session = open_with_placement(file.path, placement)
    if (shape_buckets := shape_buckets_of(session)) is None:
        self_check(session, file.path.name)
    else:  # on a GPU, where opening has run the self-check; batches are smaller than in validation
        session.rules = serving_rules(session)
        start = time.monotonic()

        def on_progress(done: int, total: int) -> None:
            if stopped():
                raise Interrupted(f"loading of model '{file.name}' was cancelled during its warm-up")
            if 10 * done // total > 10 * (done - 1) // total:
                seconds = time.monotonic() - start
                log.info("model %s: warm-up, %d of %d batch shapes in %.0f s", file.name, done, total, seconds)

        warm_up(session, shape_buckets, on_progress)
    return session


class Models:
    """The served models by name, in the given order. Owns their devices and threads.

    on_lost: called once for each device, in any thread, when it is lost; its calls fail from then on.
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
        self._devices: dict[str, ServedDevice] = {}
        self._by_name: dict[str, Classifier] = {}
        for file, session in loaded:
            name = device_name(session.placement)
            device = self._devices.get(name) or ServedDevice(name, queue, on_lost)
            self._devices[name] = device
            model_metrics = self.metrics.of_model(file.name, session)
            self._by_name[file.name] = Classifier(
                file.name, file.path.name, session, device, metrics=model_metrics, limits=limits, queue=queue
            )

    def get(self, name: str) -> Classifier:
        """Return the model of this name; without a name, the only one. Raises ModelNotFound, which lists all names."""
        if not name and len(self._by_name) == 1:
            return next(iter(self._by_name.values()))
        if name not in self._by_name:
            problem = (
                f"no model '{name}' is served"
                if name
                else "several models are served, so a name is needed (`model`, or `--name` of prelunet classify)"
            )
            raise ModelNotFound(f"{problem}. There are: {', '.join(self._by_name)}")
        return self._by_name[name]

    def all(self) -> list[Classifier]:
        """Return all models, in the given order."""
        return list(self._by_name.values())

    def close(self) -> None:
        """Finish waiting requests and end all threads."""
        for classifier in self._by_name.values():
            classifier.close()
        for device in self._devices.values():
            device.close()
