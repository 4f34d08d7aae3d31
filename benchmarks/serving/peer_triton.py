"""`model.py` of a model repository for Triton's Python backend; answers whole batches of requests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as triton
from peer_classifier import Classifier


class TritonPythonModel:
    """The interface of Triton; `execute` receives the requests that its dynamic batcher combined."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the model."""
        self._classifier = Classifier(Path(args["model_repository"]) / args["model_version"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests of one image each."""
        images = [triton.get_input_tensor_by_name(request, "images").as_numpy().item() for request in requests]
        indices, scores = self._classifier.classify(images)
        return [
            triton.InferenceResponse(
                [triton.Tensor("class_index", indices[row : row + 1]), triton.Tensor("score", scores[row : row + 1])]
            )
            for row in range(len(requests))
        ]
