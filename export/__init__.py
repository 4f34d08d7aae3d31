"""Exports checkpoints to ONNX model files with the dense head inside, and adopts foreign ONNX classifiers."""

if __name__ != "prelunet.export":  # imported from the root of a checkout: its modules would be loaded twice
    raise ImportError("import prelunet.export instead of export")
