#!/usr/bin/env bash
# The GPU tests, each file in a process of its own and within LIMIT_S seconds (300): tests/gpu/run.sh [FILE ...].
# A line for each file; whole logs are in $OUT, or else in gpu-logs/. Fails if one failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-gpu-logs}
mkdir -p "$out"
[ $# -gt 0 ] || set -- tests/gpu/test_*.py

# Warnings are errors in tests, and the first import of these, which compiles them, may warn of their syntax.
PYTHONWARNINGS=ignore python3 -c "import torchao, transformers.models.qwen3.modeling_qwen3" >"$out/imports.log" 2>&1

failed=()
for file in "$@"; do
    name=$(basename "$file" .py) start=$SECONDS
    timeout -s INT "${LIMIT_S:-300}" python3 -m pytest "$file" -m gpu -p no:cacheprovider -q -rA --tb=long \
        -W ignore::SyntaxWarning >"$out/$name.log" 2>&1 || failed+=("$name")
    echo "$name: $(tail -n 1 "$out/$name.log"), $((SECONDS - start)) s"
done
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
