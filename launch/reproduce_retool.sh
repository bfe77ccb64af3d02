#!/usr/bin/env bash
# Reproduces ReTool with the settings of arXiv 2504.11536: data, SFT, RL, evaluation on AIME 2024 and 2025
# with 32 samples per problem at temperature 1.0 and top_p 0.7, and a report. On 8 H200:
#   bash launch/reproduce_retool.sh Qwen/Qwen2.5-32B-Instruct [--dry-run]
# After a kill, the same command resumes in the same stage. All output is under OUT.
# For another model or machine, set SFT_CONFIG and RL_CONFIG; for single settings, set
# SFT_KEYS="train.steps=10 ..." and RL_KEYS.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${OUT:=runs/retool_32b}" "${BENCHMARKS:=data/aime_2024.parquet data/aime_2025.parquet}" "${SAMPLES:=32}"
: "${SFT_CONFIG:=configs/sft_qwen2.5_32b_h200x8.toml}" "${SFT_SCRIPT:=launch/sft_h200x8.sh}" "${SFT_KEYS:=}"
: "${RL_CONFIG:=configs/rl_qwen2.5_32b_h200x8.toml}" "${RL_SCRIPT:=launch/rl_h200x8.sh}" "${RL_KEYS:=}"
source launch/stages.sh
case $#,${1:--},${2:---dry-run} in
  1,[!-]*,* | 2,[!-]*,--dry-run) ;;
  *) fail "give one model (hub name or folder) and optionally --dry-run; the arguments were: ${*:-none}" ;;
esac
[ $# = 1 ] || DRY_RUN=1
export PYTHON DRY_RUN

needed=$("$PYTHON" -m retool_mcore get "$SFT_CONFIG" $SFT_KEYS data.train_file validation.files)
needed+=" $("$PYTHON" -m retool_mcore get "$RL_CONFIG" $RL_KEYS data.train_file) $BENCHMARKS"
for file in $needed; do
  [ -e "$file" ] || { stage data "$file" "$PYTHON" -m retool_mcore data fetch; break; }
done
export CONFIG=$SFT_CONFIG
stage sft "$OUT/sft/export" bash "$SFT_SCRIPT" "run.root=$OUT" run.name=sft "model.path=$1" $SFT_KEYS
export CONFIG=$RL_CONFIG
stage rl "$OUT/rl/export" bash "$RL_SCRIPT" "run.root=$OUT" run.name=rl "model.path=$OUT/sft/export" $RL_KEYS
stage eval "$OUT/eval/rl/report.json" "$PYTHON" -m retool_mcore eval "$RL_CONFIG" $RL_KEYS "run.root=$OUT" run.name=eval \
  "model.path=$OUT/sft/export" validation.temperature=1.0 validation.top_p=0.7 --n "$SAMPLES" $(printf -- "--data %s " $BENCHMARKS) \
  --model "sft=$OUT/sft/export" --model "rl=$OUT/rl/export" --out "$OUT/eval"
stage report "$OUT/report.html" "$PYTHON" -m retool_mcore report "$OUT/sft" "$OUT/rl" --eval "$OUT/eval" --out "$OUT/report.html"
