"""Turns a checkpoint into one ONNX file with the dense head inside, and checks such files."""

if __name__ != "prelunet.export":  # found beside a checkout's own files; its modules would be loaded twice
    raise ImportError("import prelunet.export instead of export")
