"""Load one model file with the project's CUDA code on the stubs of build_stubs.py, and record the result.

    LD_LIBRARY_PATH=STUBS PYTHONPATH=ROOT/src python place.py MODEL FOLDER [--run]

Runs in .venv-gpu, which has onnxruntime-gpu but neither torch nor onnx. Writes FOLDER/final.onnx, the final graph
without its weights, and FOLDER/placed.json: either the reason of a refusal, or the provider's options and the number of
nodes of each provider. With --run, batches of several shapes run through the project's binding and their CUDA calls are
counted; their results are meaningless.
"""

import argparse
import ctypes
import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from prelunet.evaluator.contract import ModelContract, contract_from_metadata
from prelunet.evaluator.engine.runtimes.onnx import OnnxRuntimeModel, load_on_cuda
from prelunet.evaluator.errors import PreluNetError

Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

KINDS = ("host to host", "host to device", "device to host", "device to device")


class RecordedSession(onnxruntime.InferenceSession):
    """A runtime session that also records the placement of nodes and writes the final graph."""

    folder: Path
    opened: "RecordedSession"

    def __init__(self, path: str, options: Any, **rest: Any):
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.optimized_model_filepath = os.fspath(self.folder / "final.onnx")
        weights = self.folder / "weights"  # weights of the final graph: 1.3 GB that nobody reads
        if not weights.is_symlink():
            weights.symlink_to(os.devnull)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights.name)
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        super().__init__(path, options, **rest)
        RecordedSession.opened = self

    def nodes_by_provider(self) -> dict[str, int]:
        """Return the number of nodes of each provider, before copies are inserted between them."""
        found: Counter[str] = Counter()
        for part in self.get_provider_graph_assignment_info():
            found[part.ep_name] += len(part.get_nodes())
        return dict(found)


def make_batch(contract: ModelContract, count: int, height: int, width: int) -> Batch:
    """Build a batch of gray canvases; if the model allows it, one image leaves part of its canvas free."""
    sizes = np.tile(np.array([height, width]), (count, 1))
    if contract.canvas == "ragged":
        sizes[-1] = contract.crop
    return np.full((count, height, width, 3), 77, np.uint8), sizes


def check_shapes(contract: ModelContract, batch: Batch, outputs: Sequence[Any]) -> None:
    """Check the shapes of all outputs against the contract."""
    *small, fetch_window_scores = outputs
    count, height, width = batch[0].shape[:3]
    classes = len(contract.classes)
    expected = [(count, classes), (count, classes), (count, 2), (count, *contract.window_grid(height, width), classes)]
    found = [value.shape for value in (*small, fetch_window_scores())]
    assert found == expected, f"output shapes {found}, expected {expected}"


def run_batches(model: OnnxRuntimeModel) -> list[dict[str, Any]]:
    """Run batches of alternating shapes like `Session`; return for each shape the CUDA calls of its run.

    First one by one, which is counted, then with uploads ahead in another thread.
    """
    contract = contract_from_metadata(model.metadata, "the model")
    shapes = ((1, contract.crop, contract.crop), (2, 250, 341), (3, 341, 256), (2, 250, 341))
    batches = [make_batch(contract, *shape) for shape in shapes]
    cuda = ctypes.CDLL("libcudart.so.13")
    copies = (ctypes.c_long * 5).in_dll(cuda, "stub_copies")
    kernels = ctypes.c_long.in_dll(cuda, "stub_kernels")
    records = []
    for batch, shape in zip(batches, shapes, strict=True):
        staged = model.stage(*batch)
        before = [*copies, kernels.value]
        outputs = model.compute(staged)
        counts = [after - earlier for after, earlier in zip([*copies, kernels.value], before, strict=True)]
        check_shapes(contract, batch, outputs)
        name = "x".join(map(str, shape))
        records.append({"shape": name, "kernels": counts[-1], "copies": dict(zip(KINDS, counts[:4], strict=True))})
    with ThreadPoolExecutor(1) as uploader:
        uploads = [uploader.submit(model.stage, *batch) for batch in batches * 3]
        for batch, upload in zip(batches * 3, uploads, strict=True):
            check_shapes(contract, batch, model.compute(upload.result()))
    return records


def main() -> None:
    """Place one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model file")
    parser.add_argument("folder", type=Path, help="folder for final.onnx and placed.json")
    parser.add_argument("--run", action="store_true", help="also run batches")
    arguments = parser.parse_args()
    RecordedSession.folder = arguments.folder
    onnxruntime.InferenceSession = RecordedSession
    try:
        model, _ = load_on_cuda(arguments.model)
    except PreluNetError as error:
        placed: dict[str, Any] = {"refused": str(error)}
    else:
        runs = run_batches(model) if arguments.run else []
        session = RecordedSession.opened
        options = session.get_provider_options()["CUDAExecutionProvider"]
        placed = {"nodes": session.nodes_by_provider(), "options": options, "runs": runs}
    (arguments.folder / "placed.json").write_text(json.dumps(placed))


if __name__ == "__main__":
    main()
