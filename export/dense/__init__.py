"""Builds the ONNX model file of a PReLU-net, with the dense head inside."""
