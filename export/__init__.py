"""Turns a checkpoint into one ONNX file with the dense head inside, and checks such files."""
