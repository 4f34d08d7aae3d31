"""The logs of a run: metrics.jsonl, TensorBoard events, and the responses of the layers."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ...evaluator.errors import import_from_extra
from ..inspection.layer_log import LayerResponse
from ..run_state.metrics_log import MetricsLog
from ..run_state.run_folder import DIAGNOSIS_FILE, EVENTS_FOLDER, METRICS_FILE

_TITLES = {  # key of metrics.jsonl → its name in TensorBoard
    "loss": "train/loss",
    "training_error": "train/top1_error",
    "rate": "train/rate",
    "images_per_second": "train/images_per_second",
    "top1_error": "val/top1_error",
    "top5_error": "val/top5_error",
    "val_loss": "val/loss",
}


class RunLogs:
    """The logs of one run; written by one process."""

    def __init__(self, folder: Path, *, events: bool, diagnose: bool, report: Callable[[str], None]) -> None:
        """Create the logs; files are opened by `resume` or the first write.

        events: whether to write TensorBoard events; diagnose: whether to log the layers; report: receives a message if
        events cannot be written. Raises MissingExtra if events are requested and TensorBoard is not installed.
        """
        self._metrics = MetricsLog(folder / METRICS_FILE)
        self._layer_log, self._log_layers = MetricsLog(folder / DIAGNOSIS_FILE), diagnose
        self._events = _Events(folder / EVENTS_FOLDER, report) if events else None

    def resume(self, step: int, *, evaluated: bool) -> None:
        """Remove the entries of later steps, which will be repeated.

        evaluated: whether the state includes the evaluation at `step`, after which layers are logged.
        """
        self._metrics.truncate_after(step, evaluated=evaluated)
        self._layer_log.truncate_after(step if evaluated else step - 1, evaluated=True)
        if self._events is not None:
            self._events.first = step + 1

    def write(self, entry: Mapping[str, Any]) -> None:
        """Write one entry; its key `step` is required."""
        self._metrics.write(dict(entry))
        if self._events is not None:
            self._events.write(entry["step"], {_TITLES[key]: entry[key] for key in _TITLES if key in entry})

    def write_layers(self, step: int, measure: Callable[[], tuple[LayerResponse, ...]]) -> None:
        """Measure the layers and log them, if layer logging is on."""
        if not self._log_layers or not (layers := measure()):
            return
        self._layer_log.write({"step": step, "layers": [layer.to_json() for layer in layers]})
        if self._events is not None:
            slopes = {f"slope/{layer.layer}": layer.slope for layer in layers if layer.slope is not None}
            self._events.write(step, slopes)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


class _Events:
    """A TensorBoard event file; each start of a run creates a new one, which hides repeated steps of earlier ones.

    Each record is written immediately: torch's writer uses a thread whose errors cannot be caught. If writing fails,
    that is reported and the events are dropped; training continues.
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        import_from_extra("tensorboard")  # here, before the first step
        self.first = 0  # step; the reader hides the events of earlier files from it on
        self._folder, self._report = folder, report
        self._file: BinaryIO | None = None
        self._gave_up = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._gave_up:
            return
        summary = Summary(value=[Summary.Value(tag=title, simple_value=value) for title, value in values.items()])
        events = [Event(step=step, summary=summary)]
        try:
            if self._file is None:
                self._folder.mkdir(exist_ok=True)
                name = f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
                self._file = (self._folder / name).open("wb", buffering=0)
                start = Event(step=self.first, session_log=SessionLog(status=SessionLog.START))
                events = [Event(file_version="brain.Event:2"), start, *events]
            for event in events:
                event.wall_time = time.time()
                RecordWriter(self._file).write(event.SerializeToString())
        except OSError as error:
            self._gave_up = True
            self._report(f"{self._folder}: TensorBoard events can no longer be written ({error.strerror}); continuing")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
