#!/usr/bin/env bash
# Checks without a GPU that every node of the model files is placed on CUDA, with no copies inside: the CUDA build of
# onnxruntime loads them on stand-ins for the CUDA libraries, which accept every kernel and run none (docs/gpu.md).
# Needs a C compiler (`cc`) and 0.5 GB for .venv-gpu; downloads 250 MB into it the first time.
#   tools/check_placement.sh [PYTHON] [--nets ACE] [--whole]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
shift $(($# > 0))

if ! command -v cc >/dev/null; then
  echo "check_placement: no C compiler 'cc'; on Debian, as root: apt-get install --no-install-recommends gcc libc6-dev" >&2
  exit 1
fi
stubs=$(mktemp -d)
trap 'rm -rf "$stubs"' EXIT

# The CUDA build of the runtime in the version of the CPU build, with which it cannot share an environment.
packages="onnxruntime-gpu==$(sed -n 's/^onnxruntime==//p' constraints.txt) pyelftools==0.33"
wanted="$packages $(sha256sum <constraints.txt)"
if [ "$(cat .venv-gpu/installed 2>/dev/null)" != "$wanted" ]; then
  rm -rf .venv-gpu
  "$python" -m venv .venv-gpu
  # shellcheck disable=SC2086 # two packages
  PIP_CONSTRAINT=constraints.txt .venv-gpu/bin/pip install --quiet --disable-pip-version-check $packages
  echo "$wanted" >.venv-gpu/installed
fi
.venv-gpu/bin/python tools/placement/build_stubs.py "$stubs"
.venv/bin/python tools/placement/check.py --stubs "$stubs" "$@"
