#!/usr/bin/env bash
# Check the fused kernels on a GPU, measure them, and compare models on CIFAR-10: raw results in the folder that is given.
# An hour or two by estimate; `benchmarks/gpu.sh FOLDER check` and `... kernels|tiles|attention|models|cifar10` run one part.
# What follows `cifar10` goes to every run, such as --data.train=folder:DIR; interrupted, it goes on in runs/cifar10.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?the folder for the results}
part=${2:-all}
mkdir -p "$folder"
wanted() { [[ $part == all || $part == "$1" ]]; }
gpu=(--device cuda --dtype bfloat16)
causal=(--batch-size 8 --heads 16 --tokens 2048 --causal)
vision=(--batch-size 256 --heads 6 --tokens 197)

if wanted check; then
    python -m pytest -q tests/dcmha/triton/test_gpu.py tests/dclm/test_gpu.py 2>&1 | tee "$folder/tests.txt" | tail -30
fi
if wanted kernels; then
    python benchmarks/kernels.py "${causal[@]}" --json "$folder/kernels_causal.json"
    python benchmarks/kernels.py "${causal[@]}" --window 256 --json "$folder/kernels_window.json"
    python benchmarks/kernels.py "${causal[@]}" --query-wise --json "$folder/kernels_query_wise.json"
    python benchmarks/kernels.py "${vision[@]}" --json "$folder/kernels_vision.json"
    python benchmarks/kernels.py "${vision[@]}" --workspace-mib 32 --json "$folder/kernels_vision_32mib.json"
    python benchmarks/kernels.py "${causal[@]}" --workspace-mib 64 --json "$folder/kernels_causal_64mib.json"
    for heads in 24 32 40 52; do
        python benchmarks/kernels.py --batch-size 4 --heads $heads --tokens 2048 --causal --json "$folder/kernels_causal_$heads.json"
    done
fi
if wanted tiles; then
    python benchmarks/tiles.py "${causal[@]}" --json "$folder/tiles_causal.json"
    python benchmarks/tiles.py "${vision[@]}" --json "$folder/tiles_vision.json"
    for heads in 32 52; do
        python benchmarks/tiles.py --batch-size 4 --heads $heads --tokens 2048 --causal --json "$folder/tiles_causal_$heads.json"
    done
    python benchmarks/tiles.py "${causal[@]}" --dtype float32 --json "$folder/tiles_causal_float32.json"
fi
if wanted attention; then
    python benchmarks/attention.py "${gpu[@]}" "${vision[@]}" --json "$folder/attention_vision.json"
    python benchmarks/attention.py "${gpu[@]}" --batch-size 8 --heads 16 --tokens 512 2048 --causal \
        --json "$folder/attention_causal.json"
    python benchmarks/attention.py "${gpu[@]}" "${causal[@]}" --window 256 --json "$folder/attention_window.json"
    python benchmarks/attention.py "${gpu[@]}" --batch-size 1 --heads 16 --tokens 8192 16384 65536 --causal --repeats 3 \
        --impls sdpa compiled triton --json "$folder/attention_long.json"
fi
if wanted models; then
    impls=(--impls triton compiled)
    compiled=("${gpu[@]}" --compile)
    python benchmarks/train_step.py --batch-size 256 "${compiled[@]}" --repeats 7 "${impls[@]}" --json "$folder/step_dcvit_small.json"
    python benchmarks/train_step_lm.py --batch-size 8 "${compiled[@]}" "${impls[@]}" --json "$folder/step_405m_1to1.json"
    python benchmarks/train_step_lm.py --batch-size 8 "${compiled[@]}" --impls triton \
        --overrides '{"windows": [256, 256, 256, null]}' --json "$folder/step_405m_3to1.json"
    python benchmarks/train_step_lm.py --batch-size 8 "${compiled[@]}" --impls triton \
        --overrides '{"key_wise": false}' --json "$folder/step_405m_query_wise.json"
    # 8 of the 24 layers, for time
    larger=(--model dcformer_pp_1b4 --batch-size 4 "${compiled[@]}" --impls triton)
    python benchmarks/train_step_lm.py "${larger[@]}" --overrides '{"num_layers": 8}' --json "$folder/step_1b4_1to1.json"
    python benchmarks/train_step_lm.py "${larger[@]}" --overrides '{"num_layers": 8, "windows": [256, 256, 256, null]}' \
        --json "$folder/step_1b4_3to1.json"
    python benchmarks/train_step_lm.py "${larger[@]}" --overrides '{"num_layers": 8, "num_groups": 4}' \
        --json "$folder/step_1b4_groups_of_8.json"
    decode=("${gpu[@]}" --compile --impls triton compiled)
    python benchmarks/decode.py --model dcformer_pp_405m "${decode[@]}" --json "$folder/decode_405m.json"
    python benchmarks/decode.py --model dcformer_pp_2b8 "${decode[@]}" --prompt 8192 --new 32 --batch-size 8 \
        --overrides '{"num_layers": 8, "context_length": 8224}' --json "$folder/decode_2b8_long.json"
fi
if wanted cifar10; then
    python -m dcvision compare --experiment configs/experiments/cifar10.yaml --out runs/cifar10 -- "${@:3}"
    cp runs/cifar10/{results.json,table.md,table.csv,curves.csv,curves.png} "$folder"
fi
