#!/usr/bin/env bash
# Measure this project on the GPU of this machine, in about eight minutes.
#
#   bash scripts/tools/gpu_day.sh --wheels FOLDER     # where there is a network: wheels that a bare JAX machine lacks
#   bash scripts/tools/gpu_day.sh OUT [PART ...]      # on the machine, from the root of the repository
#
# Every part has a time limit of its own and appends its lines to OUT/gpu_day.jsonl as they are found; what it printed
# besides is in OUT/gpu_day.log. Parts: kernels, decode, update, tests; buffers is run where it is named.
# `WHEELS=FOLDER` installs the wheels first, without a network.
set -u

WHEELS_NEEDED=(tyro docstring-parser typeguard tensorboardX jsonschema attrs referencing rpds-py
    jsonschema-specifications gguf beartype qwix)

if [ "${1:-}" = --wheels ]; then
    platforms=()
    for glibc in 2_28 2_27 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
    exec python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" --platform manylinux2014_x86_64 -d "${2:?a folder for the wheels}" "${WHEELS_NEEDED[@]}"
fi

out=${1:?a folder for what is found, or --wheels FOLDER}
shift
mkdir -p "$out"
site=${TMPDIR:-/tmp}/gpu_day_site
if [ -n "${WHEELS:-}" ] && [ ! -d "$site" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl || exit 1
fi
export PYTHONPATH=$PWD:$site PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=1

measure() { # NAME LIMIT_S COMMAND ...
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    echo "== $name: $*" >> "$out/gpu_day.log"
    timeout "$limit" "$@" 2>> "$out/gpu_day.log" | tee -a "$out/gpu_day.jsonl"
    status=${PIPESTATUS[0]}
    echo "{\"part\": \"time\", \"of\": \"$name\", \"seconds\": $((SECONDS - start)), \"limit\": $limit, \"status\": $status}" |
        tee -a "$out/gpu_day.jsonl"
}

kernels() { measure kernels 90 python3 -m scripts.tools.gpu_day.kernels; }
decode() {
    measure decode 150 python3 -m scripts.tools.gpu_day.decode --cache auto --rows 8 64 256
    measure decode 60 python3 -m scripts.tools.gpu_day.decode --cache slots --rows 64
}
buffers() { # CUDA graphs: none, ours with loops, one token and 64 a dispatch
    local graphs=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL
    for value in "" "$graphs,WHILE,CONDITIONAL"; do
        measure buffers 45 env XLA_FLAGS="--xla_gpu_enable_command_buffer=$value" DECODE_FLAGS="graphs=$value" \
            python3 -m scripts.tools.gpu_day.decode --rows 64
    done
    measure buffers 45 python3 -m scripts.tools.gpu_day.decode --rows 64 --tokens-per-dispatch 64
}
update() {
    measure update 70 python3 -m scripts.tools.gpu_day.update --size 0.5B
    measure update 70 python3 -m scripts.tools.gpu_day.update --size 1.5B
    measure update 60 python3 -m scripts.tools.gpu_day.update --size 0.5B --sequences 2 --tokens 32768 --trained 32000 --microbatch 32768
}
tests() { measure tests 90 python3 -m pytest -q -n 0 -p no:cacheprovider -m accel tests >> "$out/gpu_day.log"; }

for part in "${@:-kernels decode update tests}"; do
    for each in $part; do $each; done
done
