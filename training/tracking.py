"""What a run writes down for people: metrics.jsonl, events for TensorBoard, the responses of the layers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evaluator.errors import EnvironmentFault
from training.diagnosis_log import DiagnosisLog, LayerResponse
from training.metrics import MetricsLog
from training.run_folder import DIAGNOSIS_FILE, EVENTS_FOLDER, METRICS_FILE

_TITLES = {  # key of metrics.jsonl → its name in TensorBoard
    "loss": "train/loss",
    "rate": "train/rate",
    "images_per_second": "train/images_per_second",
    "top1_error": "val/top1_error",
    "top5_error": "val/top5_error",
}


class Tracking:
    """The logs of one run; written by one process."""

    def __init__(self, folder: Path, *, events: bool, diagnose: bool) -> None:
        """Open nothing yet: `resume` or the first line does.

        events: for TensorBoard; diagnose: whether layers are measured. Raises EnvironmentFault without TensorBoard.
        """
        self._metrics = MetricsLog(folder / METRICS_FILE)
        self._diagnosis, self._diagnoses = DiagnosisLog(folder / DIAGNOSIS_FILE), diagnose
        self._events = _Events(folder / EVENTS_FOLDER) if events else None

    def resume(self, step: int, *, evaluated: bool) -> None:
        """Take back what was written of later steps, which will be done again."""
        self._metrics.cut_after(step, evaluated=evaluated)
        self._diagnosis.cut_after(step, evaluated=evaluated)
        if self._events is not None:
            self._events.first = step + 1

    def write(self, entry: Mapping[str, Any]) -> None:
        """Write down one point; `step` says where."""
        self._metrics.write(dict(entry))
        if self._events is not None:
            self._events.write(entry["step"], {_TITLES[key]: entry[key] for key in _TITLES if key in entry})

    def write_layers(self, step: int, measure: Callable[[], tuple[LayerResponse, ...]]) -> None:
        """Measure the layers and write them down, if that was asked for."""
        if not self._diagnoses:
            return
        layers = measure()
        self._diagnosis.write(step, layers)
        if self._events is not None:
            self._events.write(
                step, {f"slope/{layer.layer}": layer.slope for layer in layers if layer.slope is not None}
            )

    def close(self) -> None:
        """Write what is held back."""
        if self._events is not None:
            self._events.close()


class _Events:
    """A file of events for TensorBoard; each start of a run begins another, and hides what an earlier one lost."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise EnvironmentFault(
                "TensorBoard is not installed, which writes its files of events: pip install tensorboard, or train "
                "with --no-tensorboard"
            ) from error
        self.first = 0
        self._kind, self._folder = SummaryWriter, folder
        self._writer: SummaryWriter | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._kind(str(self._folder), purge_step=self.first or None)
        for title, value in values.items():
            self._writer.add_scalar(title, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
