"""Print the results of NVIDIA's client as JSON, over gRPC and HTTP: python triton_http_calls.py GRPC HTTP IMAGE...

It is a separate program: its HTTP client needs gevent, and its gRPC client our message names.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

PARAMETERS = {"protocol": "ten-crop", "mirror": False}


def results(triton: Any, address: str, images: list[bytes], **as_json: bool) -> dict[str, Any]:
    """Return the results of one client."""
    found: dict[str, Any] = {}
    tensor = triton.InferInput("images", [len(images)], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=object))
    classes = [triton.InferRequestedOutput("scores", class_count=3)]
    client = triton.InferenceServerClient(address)
    answer = client.infer("six", [tensor], request_id="photo 7", parameters=PARAMETERS)
    found["scores"], found["type"] = answer.as_numpy("scores").tobytes().hex(), str(answer.as_numpy("scores").dtype)
    best = client.infer("six", [tensor], outputs=classes, parameters=PARAMETERS, model_version="1")
    found["classes"] = [[text.decode() for text in row] for row in best.as_numpy("scores")]
    found["ready"] = [
        client.is_server_live(), client.is_server_ready(), client.is_model_ready("six"), client.is_model_ready("nine"),
    ]  # fmt: skip
    found["errors"] = []
    for call in (
        lambda: client.infer("nine", [tensor]),
        lambda: client.infer("six", [tensor], priority=1),
        lambda: client.infer("six", [tensor], outputs=[triton.InferRequestedOutput("logits")]),
        lambda: client.get_model_metadata("six", "2"),
    ):
        try:
            call()
        except InferenceServerException as error:
            found["errors"].append(error.message())
    if triton is triton_http:
        outputs = [triton.InferRequestedOutput("scores", binary_data=False)]
        as_json_answer = client.infer("six", [tensor], outputs=outputs, parameters=PARAMETERS)
        found["json"] = as_json_answer.as_numpy("scores").tobytes().hex()
        named = [triton.InferRequestedOutput("scores", binary_data=False, class_count=3)]
        texts = client.infer("six", [tensor], outputs=named, parameters=PARAMETERS).as_numpy("scores")
        found["json classes"] = texts.tolist()
        for algorithm in ("gzip", "deflate"):
            squeezed = client.infer("six", [tensor], parameters=PARAMETERS, request_compression_algorithm=algorithm)
            found[algorithm] = squeezed.as_numpy("scores").tobytes().hex()
        found["id"] = answer.get_response()["id"]
    config = client.get_model_config("six", **as_json)
    found["config"] = config.get("config", config)
    index = client.get_model_repository_index(**as_json)
    found["index"] = index["models"] if isinstance(index, dict) else index
    found["server"] = client.get_server_metadata(**as_json)["name"]
    found["inputs"] = [each["name"] for each in client.get_model_metadata("six", **as_json)["inputs"]]
    statistics = client.get_inference_statistics("six", **as_json)["model_stats"][0]
    found["counted"] = int(statistics["inference_count"]) > 0
    client.close()
    return found


if __name__ == "__main__":
    pictures = [Path(name).read_bytes() for name in sys.argv[3:]]
    print(json.dumps({
        "grpc": results(triton_grpc, sys.argv[1], pictures, as_json=True),
        "http": results(triton_http, sys.argv[2], pictures),
    }))  # fmt: skip
