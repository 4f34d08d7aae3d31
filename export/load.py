"""`prelunet.load`: a model file, or another ONNX classifier, for Python programs."""

import logging
import os
import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..evaluator.engine.runtimes import Device
from ..evaluator.engine.runtimes.base import Precision
from ..evaluator.engine.runtimes.onnx_metadata import is_model_file
from ..evaluator.python.net import Net
from ..evaluator.python.net import load as load_model_file

log = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    device: Device = "auto",
    *,
    precision: Precision | None = None,
    threads: int = 0,
    **options: Any,
) -> Net:
    """Load a model file that `prelunet export` or `prelunet adopt` wrote, or adopt another ONNX classifier.

    path: of the file, or of a folder with a net and what its makers wrote beside it; device: `cpu`, `openvino`, `ncnn`,
    `cuda`, or `auto`, by the rule in docs/performance.md; precision: to compute in, None for the file's if the device
    supports it, else fp32; threads: for the model and for decoding, 0 for one per core; options: of `prelunet adopt`,
    for a net that is no model file, such as `preset="torchvision"`, `mean=(0.5, 0.5, 0.5)`, `pixel_range=255` and
    `classes="classes.txt"`. It is adopted at each call, which takes seconds, to a temporary file that goes with it.
    Raises UsageError if the file cannot be read or no such device, precision or option exists, ContractError if the
    net cannot be used, MissingExtra for a net to adopt without the extra `adopt`, EnvironmentFault if the device or its
    runtime is unavailable.
    """
    path = Path(path)
    if not options and path.is_file() and is_model_file(path):
        return load_model_file(path, device, precision=precision, threads=threads)
    from .adoption import ensure_model_file, net_options  # here, so that the first answer of a model file comes soon

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prelunet-"))
        model = ensure_model_file(path, net_options(options), Path(folder), _log)
        net = load_model_file(model, device, precision=precision, threads=threads)
        weakref.finalize(net, stack.pop_all().close)
        return net


def _log(text: str) -> None:
    log.log(logging.WARNING if text.startswith("warning: ") else logging.INFO, text)
