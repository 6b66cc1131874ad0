#!/usr/bin/env bash
# run.sh PART [ARGS…]: one part of what needs a GPU. Writes ${OUT:-build/gpu}/PART.json.
set -euo pipefail

part="${1:?kernels, host, correctness or serving}"
shift
case "$part" in
    kernels | host | correctness | serving) ;;
    *) echo "no such part: $part (kernels, host, correctness, serving)" >&2; exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
exec python3 -m "tests.gpu.$part" --out "${OUT:-build/gpu}/$part.json" "$@"
