"""What is alive at once in an exported graph."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime


def most_alive(path: Path, height: int, width: int) -> int:
    """Run the graph node by node in its order and return the most bytes of results that somebody still needs."""
    model = onnx.load(path)
    nodes = list(model.graph.node)
    names = [name for node in nodes for name in node.output]
    last_use = {name: index for index, node in enumerate(nodes) for name in node.input}
    finals = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in finals)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"images": np.ones((1, height, width, 3), np.uint8), "sizes": np.array([[height, width]], np.int64)}
    size = {name: value.nbytes for name, value in zip(names, session.run(names, feeds), strict=True)}
    alive, most = set[str](), 0
    for index, node in enumerate(nodes):
        alive |= set(node.output)
        most = max(most, sum(size[name] for name in alive))
        alive = {name for name in alive if name in finals or last_use.get(name, -1) > index}
    return most
