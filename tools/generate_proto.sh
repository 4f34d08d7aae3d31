#!/bin/sh
# Write evaluator/pb/ from proto/. The path proto/ is mapped to prelunet/evaluator/pb/, so that the generated modules
# import each other as prelunet.evaluator.pb.…; they are committed, so that only a change of the contract needs grpcio-tools.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m grpc_tools.protoc \
  --proto_path=prelunet/evaluator/pb=proto \
  --python_out=src --pyi_out=src --grpc_python_out=src \
  prelunet/evaluator/pb/prelunet/v1/prelunet.proto prelunet/evaluator/pb/inference/inference.proto
