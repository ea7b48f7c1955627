#!/usr/bin/env bash
# Run the GPU benchmarks, most important first, and write raw results to FOLDER; takes about nine minutes (estimated).
#   benchmarks/gpu.sh FOLDER          operator and training steps, with baselines
#   benchmarks/gpu.sh FOLDER PART     one part: operator, steps, check, tiles, long, cifar10
# Arguments after `cifar10`, such as --data.train=folder:DIR, apply to every run; a rerun resumes from runs/cifar10.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?the folder for the results}
part=${2:-default}
mkdir -p "$folder"
wanted() { [[ $part == "$1" || ($part == default && ($1 == operator || $1 == steps)) ]]; }
gpu=(--device cuda --dtype bfloat16)
causal=(--batch-size 8 --heads 16 --tokens 2048 --causal)
vision=(--batch-size 256 --heads 6 --tokens 197)
few=(--repeats 7)

if wanted operator; then
    python benchmarks/attention.py "${gpu[@]}" "${vision[@]}" "${few[@]}" --json "$folder/attention_vision.json"
    python benchmarks/attention.py "${gpu[@]}" "${causal[@]}" "${few[@]}" --json "$folder/attention_causal.json"
    python benchmarks/kernels.py "${vision[@]}" --json "$folder/kernels_vision.json"
    python benchmarks/kernels.py "${causal[@]}" --json "$folder/kernels_causal.json"
    python benchmarks/kernels.py "${causal[@]}" --impl older --json "$folder/kernels_causal_older.json"
    python benchmarks/attention.py "${gpu[@]}" "${causal[@]}" --window 256 "${few[@]}" --impls sdpa flex triton older \
        --json "$folder/attention_window.json"
    python benchmarks/attention.py "${gpu[@]}" --batch-size 4 --heads 32 --head-dim 128 --tokens 2048 --causal "${few[@]}" \
        --impls sdpa triton older --json "$folder/attention_32_heads.json"
    python benchmarks/kernels.py --batch-size 4 --heads 32 --head-dim 128 --tokens 2048 --causal \
        --json "$folder/kernels_32_heads.json"
    # shapes of dc_triton_opt, with and without key-side weights
    for window in 112 240; do
        larger=(--batch-size 16 --heads 32 --head-dim 128 --tokens 4096 --causal --window $window --repeats 3)
        python benchmarks/attention.py "${gpu[@]}" "${larger[@]}" --impls flex triton --json "$folder/attention_w$window.json"
        python benchmarks/attention.py "${gpu[@]}" "${larger[@]}" --impls flex triton --rank 1 --query-wise --groups 8 \
            --json "$folder/attention_w${window}_restricted.json"
    done
    python benchmarks/decode.py --model dcformer_pp_405m "${gpu[@]}" --compile --impls triton --json "$folder/decode_405m.json"
    python benchmarks/predictions.py "$folder"/kernels_*.json | tee "$folder/predictions.txt"
fi
if wanted steps; then
    steps=("${gpu[@]}" --compile --impls triton)
    python benchmarks/train_step.py --batch-size 256 "${steps[@]}" --repeats 7 --json "$folder/step_dcvit_small.json"
    python benchmarks/train_step_lm.py --batch-size 8 "${steps[@]}" --overrides '{"windows": [256, 256, 256, null]}' \
        --json "$folder/step_405m_3to1.json"
    python benchmarks/train_step_lm.py --batch-size 8 "${steps[@]}" --json "$folder/step_405m_1to1.json"
fi
if wanted check; then
    python -m pytest -q -m gpu tests 2>&1 | tee "$folder/tests.txt" | tail -30
fi
if wanted tiles; then
    python benchmarks/tiles.py "${causal[@]}" --json "$folder/tiles_causal.json"
    python benchmarks/tiles.py "${vision[@]}" --json "$folder/tiles_vision.json"
    python benchmarks/tiles.py "${causal[@]}" --window 256 --json "$folder/tiles_window.json"
    python benchmarks/tiles.py --batch-size 4 --heads 32 --tokens 2048 --causal --json "$folder/tiles_32_heads.json"
fi
if wanted long; then
    python benchmarks/attention.py "${gpu[@]}" --batch-size 1 --heads 16 --tokens 8192 16384 65536 --causal --repeats 3 \
        --impls sdpa compiled triton --json "$folder/attention_long.json"
    larger=(--model dcformer_pp_1b4 --batch-size 4 "${gpu[@]}" --compile --impls triton) # 8 of 24 layers, to save time
    python benchmarks/train_step_lm.py "${larger[@]}" --overrides '{"num_layers": 8}' --json "$folder/step_1b4_1to1.json"
    python benchmarks/train_step_lm.py "${larger[@]}" --overrides '{"num_layers": 8, "windows": [256, 256, 256, null]}' \
        --json "$folder/step_1b4_3to1.json"
    python benchmarks/train_step_lm.py "${larger[@]}" --overrides '{"num_layers": 8, "num_groups": 4}' \
        --json "$folder/step_1b4_groups_of_8.json"
    python benchmarks/train_step_lm.py --batch-size 8 "${gpu[@]}" --compile --impls triton \
        --overrides '{"key_wise": false}' --json "$folder/step_405m_query_wise.json"
    python benchmarks/decode.py --model dcformer_pp_2b8 "${gpu[@]}" --compile --impls triton compiled --prompt 8192 \
        --new 32 --batch-size 8 --overrides '{"num_layers": 8, "context_length": 8224}' --json "$folder/decode_2b8_long.json"
fi
if wanted cifar10; then
    python -m dcvision compare --experiment configs/experiments/cifar10.yaml --out runs/cifar10 -- "${@:3}"
    cp runs/cifar10/{results.json,table.md,table.csv,curves.csv,curves.png} "$folder"
fi
