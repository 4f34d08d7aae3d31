import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["prelunet.evaluator.serving.server", "prelunet.evaluator.verbs.serve"])
def test_serving_imports_neither_the_training_libraries_nor_a_runtime_nor_opentelemetry(module: str) -> None:
    program = f"import {module}, sys; print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert {"prelunet.evaluator", "grpc", "numpy"} <= loaded
    others = {"torch", "onnx", "safetensors", "onnxruntime", "opentelemetry", "prelunet.training", "prelunet.export"}
    assert not loaded & others
