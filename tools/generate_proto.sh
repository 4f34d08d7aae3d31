#!/bin/sh
# Generate evaluator/pb/ from proto/. The path proto/ is mapped to prelunet/evaluator/pb/, so that the generated modules
# import each other as prelunet.evaluator.pb.…. They are committed: only a change of proto/ needs grpcio-tools.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m grpc_tools.protoc \
  --proto_path=prelunet/evaluator/pb=proto \
  --python_out=src --pyi_out=src --grpc_python_out=src \
  prelunet/evaluator/pb/prelunet/v1/prelunet.proto prelunet/evaluator/pb/inference/inference.proto
