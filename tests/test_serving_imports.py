import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["evaluator.serving.server", "evaluator.client", "evaluator.verbs.serve"])
def test_serving_imports_neither_the_training_libraries_nor_a_runtime(module: str) -> None:
    program = f"import {module}, sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert {"evaluator", "grpc", "numpy"} <= loaded
    assert not loaded & {"torch", "onnx", "safetensors", "training", "export", "onnxruntime"}
