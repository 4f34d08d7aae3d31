"""Wraps a fixed-size ONNX classifier into a model file."""
