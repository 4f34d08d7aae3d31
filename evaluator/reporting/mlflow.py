"""Log a run with its report to MLflow. Only this module imports mlflow, which the extra `mlflow` installs."""

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

from ..errors import EnvironmentFault, import_from_extra
from ..files import sha256_of
from ..validation.run import RUN_FILE
from .report_page import WrittenReport
from .runs import read_runs
from .statistics import TOPS

_METRICS = (
    *("evaluated", "refused", "images_per_second"),
    *(f"top{k}_{what}" for k in TOPS for what in ("error", "low", "high")),
)
_PARAMETERS = (
    *("model", "architecture", "sha256", "dataset", "fingerprint", "selection", "restriction", "images"),
    *("protocol", "views", "provider", "precision", "versions"),
)
_TAG = "prelunet.run"  # sha256 of run.json, which determines the results


def log_to_mlflow(folder: Path, written: WrittenReport) -> str:
    """Log parameters, metrics and files of a finished run; return where, as the tracking URI with MLflow's run id.

    A run that MLflow's experiment already has is logged to the same entry.
    Raises MissingExtra without the extra `mlflow`, EnvironmentFault if MLflow refuses or cannot be reached.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nobody is told but the server that the user chose
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # 7 by default, which take 4 minutes
    mlflow = import_from_extra("mlflow")
    (row,) = read_runs(folder, depth=0).values()
    digest = sha256_of(folder / RUN_FILE)
    uri = mlflow.get_tracking_uri()
    try:
        same = mlflow.search_runs(filter_string=f"tags.`{_TAG}` = '{digest}'", output_format="list")
        entry = {"run_id": same[0].info.run_id} if same else {"run_name": folder.resolve().name}
        with redirect_stdout(sys.stderr), mlflow.start_run(**entry, tags={_TAG: digest}) as run:  # it prints an address
            mlflow.log_params({key: row[key] for key in _PARAMETERS if row[key] is not None})
            mlflow.log_metrics({key: row[key] for key in _METRICS if row[key] is not None})
            for path in filter(None, (written.html, written.json, folder / RUN_FILE)):
                mlflow.log_artifact(path)
    except mlflow.MlflowException as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise EnvironmentFault(
            f"MLflow at {uri}: {reason}. Set MLFLOW_TRACKING_URI to a server, e.g. http://127.0.0.1:5000"
        ) from error
    return f"{uri}, run {run.info.run_id}"
