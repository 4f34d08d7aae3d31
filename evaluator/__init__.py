"""Runs exported nets: images, batching, validation, reports, gRPC server. Needs neither torch nor onnx."""

if __name__ != "prelunet.evaluator":  # imported from a checkout's root; its modules would be loaded twice
    raise ImportError("import prelunet.evaluator instead of evaluator")
