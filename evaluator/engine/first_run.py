"""Run an int8 file for the first time in a child process, so that a crash of the runtime ends the child, not a server.

OpenVINO 2026.1 to 2026.3 crashed on CPUs with AMX when an int8 model with dynamic shapes received a small input
(openvino issue 37577). Nothing shows beforehand whether a processor and a version are affected.
"""

import contextlib
import importlib.metadata
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from ..contract import contract_from_metadata, golden_image, golden_sizes
from ..errors import EnvironmentFault
from .runtimes import openvino


def try_first_run(path: Path, threads: int) -> None:
    """Load an int8 file with OpenVINO in a child process, and run it on one and two images of each golden size.

    Raises EnvironmentFault if a signal ends the child. Any other error is left to this process, which will meet it too.
    """
    # -P: modules in the current folder must not shadow installed ones. A session of its own: a signal to this process's
    # group, such as Ctrl-C, would look like a crash.
    command = [sys.executable, "-P", "-m", __name__, str(path), str(threads)]
    quiet = subprocess.DEVNULL
    status = subprocess.run(  # noqa: S603
        command, stdin=quiet, stdout=quiet, stderr=quiet, check=False, start_new_session=True
    ).returncode
    if status < 0:
        name = signal.Signals(-status).name
        memory = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        raise EnvironmentFault(
            f"{path}: OpenVINO {importlib.metadata.version('openvino')} crashed on this processor when a trial process "
            f"ran this int8 file ({name}{memory}). Install another version of openvino, or use --device cpu, or a file "
            "of prelunet export --precision fp32"
        )


def _main(path: Path, threads: int) -> None:
    with contextlib.suppress(Exception):
        loaded = openvino.load(path, "int8", threads=threads)
        for size in golden_sizes(contract_from_metadata(loaded.metadata, str(path)).crop):
            for rows in (1, 2):
                images = np.stack([golden_image(*size)] * rows)
                loaded.compute(loaded.stage(images, np.array([size] * rows)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
