#!/usr/bin/env bash
# ReTool's effect on GSM8K, on one GPU of 80 GB: SFT on programs and on words, RL with the tool and RL
# in words alone from that model with the same steps and samples, then the test set for all four
# models, compared problem by problem, and a report.
#   bash launch/gsm8k_gpu1.sh MODEL [section.key=value ...] [--dry-run]
# MODEL is a hub name or a folder. The settings are of SFT and RL; those of one of them: SFT_KEYS, RL_KEYS.
# PROBLEMS=large: the same problems with large numbers, where a program beats arithmetic in words.
# Killed? The same command goes on where it was. Everything it makes is under OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${OUT:=runs/gsm8k}" "${GSM8K:=data/gsm8k}" "${SFT_KEYS:=}" "${RL_KEYS:=}" "${LIMIT:=}" "${PROBLEMS:=plain}"
: "${SFT_CONFIG:=configs/sft_gsm8k_gpu1.toml}" "${RL_CONFIG:=configs/rl_gsm8k_gpu1.toml}"
source launch/env_cuda.sh
source launch/nodes.sh
source launch/stages.sh
MODEL=${1:-}
case $MODEL in '' | -* | *=*) fail "the first word is a model, a hub name or a folder; given: ${*:-nothing}" ;; esac
case $PROBLEMS in plain) DATA=$GSM8K ;; large) DATA=$OUT/data/large ;; *) fail "PROBLEMS = $PROBLEMS is not plain or large" ;; esac
KEYS=()
for word in "${@:2}"; do
  if [ "$word" = --dry-run ]; then DRY_RUN=1; else KEYS+=("$word"); fi
done
retool=("$PYTHON" -m retool_mcore)
PROTOCOL=$("${retool[@]}" data protocol "$MODEL") || exit 2
sft=("$SFT_CONFIG" "run.root=$OUT" run.name=sft "model.path=$MODEL" "data.train_file=$OUT/data/sft.parquet"
  "validation.files=[\"$OUT/data/sft_val.parquet\"]" "${KEYS[@]}" $SFT_KEYS)
rl=("$RL_CONFIG" "run.root=$OUT" "rollout.protocol=$PROTOCOL" "data.train_file=$OUT/data/rl.parquet"
  "validation.files=[\"$OUT/data/validation.parquet\"]" "${KEYS[@]}" $RL_KEYS)

# The plan, before anything is made.
gpus=$("${retool[@]}" get "${sft[@]}" cluster.gpus_per_node) || exit 2
: "${HARDWARE:=h100x$gpus}"
"${retool[@]}" plan "${sft[@]}" --hardware "$HARDWARE"
"${retool[@]}" plan "${rl[@]}" "model.path=$MODEL" run.name=tool_rl --hardware "$HARDWARE"

[ -e "$GSM8K" ] || stage gsm8k "$GSM8K" "${retool[@]}" data fetch "$(dirname "$GSM8K")" --only openai/gsm8k
if [ "$PROBLEMS" = large ]; then
  for split in "train --draws 3" test; do  # fewer than half of the problems can be enlarged
    read -r name draws <<<"$split"
    stage "large_$name" "$DATA/$name.jsonl" "${retool[@]}" data build gsm8k-large "$GSM8K/$name.jsonl" $draws --out "$DATA/$name.jsonl"
  done
fi
for part in sft validation; do
  file=$OUT/data/$part.parquet
  [ $part = sft ] || file=$OUT/data/sft_val.parquet
  traces=$file
  [ "$PROTOCOL" = hermes ] || traces=$OUT/data/traces_$part.parquet
  stage "traces_$part" "$traces" "${retool[@]}" data build gsm8k "$DATA/train.jsonl" --calls one --text --part $part --out "$traces"
  [ "$traces" = "$file" ] || stage "inline_$part" "$file" "${retool[@]}" data sft "$traces" --truth ground_truth --protocol retool --out "$file"
done
stage problems "$OUT/data/rl.parquet" "${retool[@]}" data rl "$DATA/train.jsonl" --part rl --out "$OUT/data/rl.parquet"
stage validation "$OUT/data/validation.parquet" "${retool[@]}" data rl "$DATA/train.jsonl" --part validation \
  --out "$OUT/data/validation.parquet"

stage sft "$OUT/sft/export" "${retool[@]}" sft "${sft[@]}"
stage tool_rl "$OUT/tool_rl/export" "${retool[@]}" rl "${rl[@]}" run.name=tool_rl "model.path=$OUT/sft/export"
stage text_rl "$OUT/text_rl/export" "${retool[@]}" rl "${rl[@]}" run.name=text_rl "model.path=$OUT/sft/export" "rollout.tools=[]"

models=(--model "base=$MODEL" --model "sft=$OUT/sft/export" --model "tool_rl=$OUT/tool_rl/export" --model "text_rl=$OUT/text_rl/export")
stage eval "$OUT/eval/text_rl_text/report.json" "${retool[@]}" eval "${rl[@]}" run.name=eval "model.path=$OUT/sft/export" \
  validation.temperature=0 --n 1 --tool both --data "$DATA/test.jsonl" ${LIMIT:+--limit "$LIMIT"} "${models[@]}" --out "$OUT/eval"
stage tool_to_text "$OUT/tool_to_text.json" "${retool[@]}" eval compare "$OUT/eval/text_rl_text" "$OUT/eval/tool_rl" --out "$OUT/tool_to_text.json"
stage tool_to_sft "$OUT/tool_to_sft.json" "${retool[@]}" eval compare "$OUT/eval/sft" "$OUT/eval/tool_rl" --out "$OUT/tool_to_sft.json"
stage report "$OUT/report.html" "${retool[@]}" report "$OUT/sft" "$OUT/tool_rl" "$OUT/text_rl" --eval "$OUT/eval" --out "$OUT/report.html"
