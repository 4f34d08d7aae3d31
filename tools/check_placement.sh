#!/usr/bin/env bash
# Checks without a GPU that every node of the model files is placed on CUDA, with no copies inside: the CUDA build of
# onnxruntime loads them on stand-ins for the CUDA libraries, which accept every kernel and run none (docs/gpu.md).
# Makes .venv-gpu the first time, 0.5 GB of which 250 MB are downloaded; takes `cc` or brings a C compiler along.
#   tools/check_placement.sh [PYTHON] [--nets ACE] [--whole]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
shift $(($# > 0))

stubs=$(mktemp -d)
trap 'rm -rf "$stubs"' EXIT

# The CUDA build of the runtime in the version of the CPU build, with which it cannot share an environment.
packages="onnxruntime-gpu==$(sed -n 's/^onnxruntime==//p' constraints.txt) pyelftools==0.33"
if [ -z "${CC:-}" ] && ! command -v cc >/dev/null; then
  packages+=" ziglang==0.17.0" # a C compiler from the package index, 100 MB
  export CC="$PWD/.venv-gpu/bin/python -m ziglang cc"
fi
wanted="$packages $(sha256sum <constraints.txt)"
if [ "$(cat .venv-gpu/installed 2>/dev/null)" != "$wanted" ]; then
  rm -rf .venv-gpu
  "$python" -m venv .venv-gpu
  # shellcheck disable=SC2086 # several packages
  PIP_CONSTRAINT=constraints.txt .venv-gpu/bin/pip install --quiet --disable-pip-version-check $packages
  echo "$wanted" >.venv-gpu/installed
fi
.venv-gpu/bin/python tools/placement/build_stubs.py "$stubs"
.venv/bin/python tools/placement/check.py --stubs "$stubs" "$@"
