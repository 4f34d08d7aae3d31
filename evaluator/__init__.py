"""Runs exported nets: image path, batching, validation, reports, gRPC server. Needs neither torch nor onnx."""

if __name__ != "prelunet.evaluator":  # found beside a checkout's own files; its modules would be loaded twice
    raise ImportError("import prelunet.evaluator instead of evaluator")
