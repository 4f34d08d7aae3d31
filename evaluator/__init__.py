"""Runs exported nets: image path, batching, validation, reports, gRPC server. Needs neither torch nor onnx."""
