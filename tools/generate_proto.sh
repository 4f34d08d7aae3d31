#!/bin/sh
# Write evaluator/pb/ from proto/. The path proto/ is mapped to evaluator/pb/, so that the generated modules import each
# other as evaluator.pb.…; the result is committed, so that only a change of the contract needs grpcio-tools.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m grpc_tools.protoc \
  --proto_path=evaluator/pb=proto \
  --python_out=. --pyi_out=. --grpc_python_out=. \
  evaluator/pb/prelunet/v1/prelunet.proto evaluator/pb/inference/inference.proto
