"""Builds the ONNX file of a PReLU-net, dense head inside."""
