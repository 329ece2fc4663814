#!/usr/bin/env bash
# Checks the runtime on a machine with a CUDA device: its tests and its benchmark, in under 5 minutes.
# Needs Python with torch, numpy and pytest; neither Flower nor a network. Run from anywhere: scripts/gpu_check.sh [OUT]
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
out=${1:-$(mktemp -d)}
mkdir -p "$out" || exit 1
status=0

step() { # step LIMIT_S NAME COMMAND...
    local limit=$1 name=$2 code
    shift 2
    echo "== $name (at most $limit s)"
    timeout --signal=INT --kill-after=10 "$limit" "$@"
    code=$?
    if [ "$code" -ne 0 ]; then
        echo "!! $name: exit code $code"
        status=1
    fi
}

PACELINE_CACHE_DIR=$(mktemp -d)
export PACELINE_CACHE_DIR PYTHONDONTWRITEBYTECODE=1
trap 'rm -rf "$PACELINE_CACHE_DIR"' EXIT

step 30 "doctor" "$python" -m gpu_runtime doctor --json "$out/doctor.json"
step 120 "tests" "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu_runtime
step 120 "benchmark" "$python" -m gpu_runtime bench --quick --budget 100 --mixes driving,balanced,small,alone \
    --json "$out/bench.json"

echo "== results in $out"
exit "$status"
