"""The MLServer runtime named in model-settings.json; answers whole batches of requests."""

import asyncio
from pathlib import Path

from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput
from peer_classifier import Classifier


class Runtime(MLModel):  # type: ignore[misc]  # mlserver is only in the peer's environment
    """The interface of MLServer; `predict` receives the requests that its adaptive batcher combined."""

    async def load(self) -> bool:
        """Open the model."""
        self._classifier = Classifier(Path(self.settings.parameters.uri))
        self._turn = asyncio.Semaphore(self._classifier.spec["at_once"])  # more would only share the cores
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Classify a batch of images in a thread, so that the event loop keeps reading requests."""
        images = list(payload.inputs[0].data.root)
        async with self._turn:
            indices, scores = await asyncio.to_thread(self._classifier.classify, images)
        outputs = [
            ResponseOutput(name=name, datatype=datatype, shape=list(rows.shape), data=rows.ravel().tolist())
            for name, datatype, rows in (("class_index", "INT32", indices), ("score", "FP32", scores))
        ]
        return InferenceResponse(model_name=self.name, outputs=outputs)
