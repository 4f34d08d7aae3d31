"""Print the results of NVIDIA's client as JSON: python triton_calls.py ADDRESS IMAGE...

It is a separate program, because the client registers the same message names as our inference_pb2 and a process has
only one registry.
"""

import asyncio
import json
import queue
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from tests.serving.api.triton_fields import fields_of

PARAMETERS = {"protocol": "ten-crop", "mirror": False}


def images_input(images: Sequence[bytes], shape: Sequence[int] | None = None) -> list[Any]:
    """Return the input of a request."""
    tensor = triton.InferInput("images", shape or [len(images)], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=object).reshape(shape or [len(images)]))
    return [tensor]


def failure(call: Callable[[], Any]) -> list[str]:
    """Return status and text of a failing call."""
    try:
        call()
    except InferenceServerException as error:
        return [str(error.status()), str(error.message())]
    return ["OK", ""]


def texts(result: Any) -> list[list[str]]:
    """Return the classes of an answer."""
    return [[text.decode() for text in row] for row in result.as_numpy("scores")]


def server_info(client: triton.InferenceServerClient) -> dict[str, Any]:
    """Return everything that a server reports about itself."""
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model ready": [client.is_model_ready("six"), client.is_model_ready("six", "2"), client.is_model_ready("nine")],
        "server": client.get_server_metadata(as_json=True),
        "model": client.get_model_metadata("six", as_json=True),
        "config": client.get_model_config("six", as_json=True),
        "index": client.get_model_repository_index(as_json=True),
        "statistics": client.get_inference_statistics("six", as_json=True),
        "no loading": failure(lambda: client.load_model("six")),
        "no unloading": failure(lambda: client.unload_model("six")),
        "no shared memory": failure(client.get_system_shared_memory_status),
        "no shared memory of a GPU": failure(client.get_cuda_shared_memory_status),
        "no trace": failure(client.get_trace_settings),
        "no log settings": failure(client.get_log_settings),
    }


def with_sync_client(address: str, images: list[bytes]) -> dict[str, Any]:
    """Make calls with the synchronous client."""
    results: dict[str, Any] = {}
    classes = [triton.InferRequestedOutput("scores", class_count=3)]
    with triton.InferenceServerClient(address) as client:
        result = client.infer("six", images_input(images), request_id="photo 7", parameters=PARAMETERS)
        results["scores"], results["id"] = result.as_numpy("scores").tolist(), result.get_response().id
        results["type"] = str(result.as_numpy("scores").dtype)
        column = images_input(images, [len(images), 1])
        results["column"] = client.infer("six", column, parameters=PARAMETERS).as_numpy("scores").tolist()
        results["classes"] = texts(client.infer("six", images_input(images), outputs=classes, parameters=PARAMETERS))
        padded = images_input([image + bytes(5000) for image in images])  # gRPC sends plain what does not shrink
        for algorithm in ("gzip", "deflate"):
            squeezed = client.infer("six", padded, compression_algorithm=algorithm, parameters=PARAMETERS)
            results[algorithm] = squeezed.as_numpy("scores").tolist()
        answers: queue.Queue[Any] = queue.Queue()
        for image in images:
            client.async_infer(
                "six", images_input([image]), lambda result, error: answers.put((result, error)), parameters=PARAMETERS
            )
        results["async errors"] = [str(error) for _, error in (answers.get(timeout=60) for _ in images) if error]
        results["stream"] = streamed(client, [*images, b"no image"])
        results["bad image"] = failure(lambda: client.infer("six", images_input([images[0], b"no image"])))
        results["bad model"] = failure(lambda: client.infer("nine", images_input(images)))
        results["negative timeout"] = failure(lambda: client.infer("six", images_input(images), timeout=-1))
        results["priority"] = failure(lambda: client.infer("six", images_input(images), priority=1))
        results["sequence"] = failure(lambda: client.infer("six", images_input(images), sequence_id=4))
        results["no time"] = failure(lambda: client.infer("six", images_input(images), client_timeout=1e-4))
        results["of server"] = server_info(client)
    return results


def streamed(client: triton.InferenceServerClient, images: list[bytes]) -> list[list[Any]]:
    """Send images over a stream; return id, scores and error of each answer."""
    answers: queue.Queue[list[Any]] = queue.Queue()

    def take(result: Any, error: Any) -> None:
        if error is not None:
            answers.put(["", None, str(error)])
        else:
            answers.put([result.get_response().id, result.as_numpy("scores")[0].tolist(), ""])

    client.start_stream(callback=take)
    for place, image in enumerate(images):
        client.async_stream_infer(
            "six",
            images_input([image]),
            request_id=str(place),
            parameters=PARAMETERS,
            enable_empty_final_response=True,
        )
    client.stop_stream()
    return [answers.get(timeout=60) for _ in images]


async def with_aio_client(address: str, images: list[bytes]) -> dict[str, Any]:
    """Make calls with the asyncio client."""
    classes = [triton_aio.InferRequestedOutput("scores", class_count=3)]
    async with triton_aio.InferenceServerClient(address) as client:
        results = await asyncio.gather(
            *(client.infer("six", images_input([image]), parameters=PARAMETERS) for image in images)
        )
        best = await client.infer("six", images_input(images), outputs=classes, parameters=PARAMETERS)

        async def requests() -> Any:
            for image in images:
                yield {"model_name": "six", "inputs": images_input([image]), "parameters": PARAMETERS}

        stream = [
            (None if error else result.as_numpy("scores")[0].tolist(), str(error))
            async for result, error in client.stream_infer(requests())
        ]
        try:
            await client.infer("nine", images_input(images))
        except InferenceServerException as error:
            failed = [str(error.status()), str(error.message())]
        return {
            "ready": [await client.is_server_live(), await client.is_model_ready("six")],
            "scores": [result.as_numpy("scores")[0].tolist() for result in results],
            "classes": texts(best),
            "stream": stream,
            "bad model": failed,
            "config": await client.get_model_config("six", as_json=True),
        }


def client_protocol() -> dict[str, Any]:
    """Return the messages and methods that the client defines."""
    messages: dict[str, Any] = {}
    for file in (service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR):
        for descriptor in file.message_types_by_name.values():
            messages |= fields_of(descriptor)
        for enum in file.enum_types_by_name.values():
            messages[enum.full_name] = {value.name: value.number for value in enum.values}
    methods = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    return {
        "messages": messages,
        "methods": {
            method.name: [
                method.input_type.full_name,
                method.output_type.full_name,
                method.client_streaming,
                method.server_streaming,
            ]
            for method in methods
        },
    }


if __name__ == "__main__":
    server, pictures = sys.argv[1], [Path(name).read_bytes() for name in sys.argv[2:]]
    print(json.dumps({
        "protocol": client_protocol(),
        "sync": with_sync_client(server, pictures),
        "aio": asyncio.run(with_aio_client(server, pictures)),
    }))  # fmt: skip
