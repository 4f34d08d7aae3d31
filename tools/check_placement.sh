#!/usr/bin/env bash
# Check without a GPU that every node of the model files is placed on CUDA, without copies in between: the CUDA build of
# onnxruntime loads them with stubs of the CUDA libraries, which accept every kernel and run none (tools/placement/README.md).
# The first run creates .venv-gpu, 0.5 GB, of which 250 MB are downloaded; it uses `cc` or installs a C compiler.
#   tools/check_placement.sh [PYTHON] [--nets ACE] [--whole]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
shift $(($# > 0))

stubs=$(mktemp -d)
trap 'rm -rf "$stubs"' EXIT

# The CUDA build of onnxruntime in the version of the CPU build; the two cannot share an environment.
# msgspec is what reading a contract needs; PIP_CONSTRAINT below gives its version.
packages="onnxruntime-gpu==$(sed -n 's/^onnxruntime==//p' constraints.txt) msgspec pyelftools==0.33"
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
