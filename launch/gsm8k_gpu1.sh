#!/usr/bin/env bash
# Measures ReTool's effect on GSM8K, on one 80 GB GPU: SFT on solutions with and without programs, then RL
# with the tool and RL without it, both from the SFT model with the same steps and samples. Evaluates all
# four models on the test set, compares them problem by problem, and writes a report.
#   bash launch/gsm8k_gpu1.sh MODEL [section.key=value ...] [--dry-run]
# MODEL is a hub name or a folder. The settings apply to SFT and RL; SFT_KEYS and RL_KEYS to one of them.
# PROBLEMS=large: the same problems with large numbers, where programs beat mental arithmetic.
# AT_ONCE=1: share the GPU. Both RL runs train at once, and models are evaluated while others train.
# For models up to 0.6B.
# After a kill, the same command resumes. All output is under OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${OUT:=runs/gsm8k}" "${GSM8K:=data/gsm8k}" "${SFT_KEYS:=}" "${RL_KEYS:=}" "${LIMIT:=}" "${PROBLEMS:=plain}" "${AT_ONCE:=}"
: "${SFT_CONFIG:=configs/sft_gsm8k_gpu1.toml}" "${RL_CONFIG:=configs/rl_gsm8k_gpu1.toml}"
source launch/env_cuda.sh
source launch/stages.sh
MODEL=${1:-}
case $MODEL in '' | -* | *=*) fail "the first argument must be a model (hub name or folder); the arguments were: ${*:-none}" ;; esac
case $PROBLEMS in plain) DATA=$GSM8K ;; large) DATA=$OUT/data/large ;; *) fail "Unknown PROBLEMS = $PROBLEMS. Choose plain or large." ;; esac
KEYS=()
for word in "${@:2}"; do
  if [ "$word" = --dry-run ]; then DRY_RUN=1; else KEYS+=("$word"); fi
done
# If this recipe has finished with the same settings, exit at once.
recipe="$* $OUT $GSM8K $SFT_CONFIG $RL_CONFIG $SFT_KEYS $RL_KEYS $LIMIT $PROBLEMS $AT_ONCE"
finished "$recipe" "$OUT"/{sft,tool_rl,text_rl}/export "$OUT/eval/text_rl/text_rl_text/report.json" "$OUT/report.html" && exit 0
retool=("$PYTHON" -m retool_mcore)
PROTOCOL=$("${retool[@]}" data protocol "$MODEL") || exit 2
sft=("$SFT_CONFIG" "run.root=$OUT" run.name=sft "model.path=$MODEL" "data.train_file=$OUT/data/sft.parquet"
  "validation.files=[\"$OUT/data/sft_val.parquet\"]" "${KEYS[@]}" $SFT_KEYS)
rl=("$RL_CONFIG" "run.root=$OUT" "rollout.protocol=$PROTOCOL" "data.train_file=$OUT/data/rl.parquet"
  "validation.files=[\"$OUT/data/validation.parquet\"]" ${AT_ONCE:+train.micro_batch_tokens=16384} "${KEYS[@]}" $RL_KEYS)

# Check and plan while the large problems are made. Prompt and response have 380 tokens on average
# (perf/RESULTS.md). The plan is for this machine's GPU, or for HARDWARE.
command -v nvidia-smi >/dev/null || {
  gpus=$("${retool[@]}" get "${sft[@]}" cluster.gpus_per_node) || exit 2
  : "${HARDWARE:=h100x$gpus}"
}
if [ -z "$DRY_RUN" ]; then
  check preflight_sft "${retool[@]}" preflight "${sft[@]}" --without-data
  check preflight_rl "${retool[@]}" preflight "${rl[@]}" "model.path=$MODEL" run.name=tool_rl --without-data
fi
check plan_sft "${retool[@]}" plan "${sft[@]}" ${HARDWARE:+--hardware "$HARDWARE"}
check plan_rl "${retool[@]}" plan "${rl[@]}" "model.path=$MODEL" run.name=tool_rl --mean-tokens 380 ${HARDWARE:+--hardware "$HARDWARE"}

how=stage
[ -z "$AT_ONCE" ] || how=in_background
# evaluate NAME MODEL: samples the model with and without the tool, as the runs' validation does: at temperature 1, n = 4.
evaluate() {
  $how "eval_$1" "$OUT/eval/$1/$1_text/report.json" "${retool[@]}" eval "${rl[@]}" run.name=eval "model.path=$2" \
    --n 4 --tool both --data "$DATA/test.jsonl" ${LIMIT:+--limit "$LIMIT"} --model "$1=$2" --out "$OUT/eval/$1"
}

if [ ! -e "$GSM8K" ]; then
  wait_for_checks
  stage gsm8k "$GSM8K" "${retool[@]}" data fetch "$(dirname "$GSM8K")" --only openai/gsm8k
fi
if [ "$PROBLEMS" = large ]; then
  large=("$PYTHON" launch/gsm8k/large.py)
  in_background large_test "$DATA/test.jsonl" "${large[@]}" "$GSM8K/test.jsonl" --out "$DATA/test.jsonl"
  in_background large_train "$DATA/train.jsonl" "${large[@]}" "$GSM8K/train.jsonl" --draws 3 --out "$DATA/train.jsonl"  # three variants of each, because half of the problems cannot be enlarged
  wait_for large_test
fi
wait_for_checks
evaluate base "$MODEL"
wait_for large_train
in_background problems "$OUT/data/rl.parquet" "${retool[@]}" data rl "$DATA/train.jsonl" --part rl --out "$OUT/data/rl.parquet"
in_background validation "$OUT/data/validation.parquet" "${retool[@]}" data rl "$DATA/train.jsonl" --part validation \
  --out "$OUT/data/validation.parquet"
for form in traces inline; do  # protocol "retool" needs inline traces
  for part in sft validation; do
    file=$OUT/data/sft.parquet
    [ $part = sft ] || file=$OUT/data/sft_val.parquet
    traces=$file
    [ "$PROTOCOL" = hermes ] || traces=$OUT/data/traces_$part.parquet
    if [ $form = traces ]; then
      in_background "traces_$part" "$traces" "$PYTHON" launch/gsm8k/traces.py "$DATA/train.jsonl" --part $part --out "$traces"
    elif [ "$traces" != "$file" ]; then
      in_background "inline_$part" "$file" "${retool[@]}" data sft "$traces" --truth ground_truth --protocol retool --out "$file"
    fi
  done
  wait_for "${form}_sft" "${form}_validation"
done
wait_for problems validation

$how sft "$OUT/sft/export" "${retool[@]}" sft "${sft[@]}"
wait_for sft

$how tool_rl "$OUT/tool_rl/export" "${retool[@]}" rl "${rl[@]}" run.name=tool_rl "model.path=$OUT/sft/export"
$how text_rl "$OUT/text_rl/export" "${retool[@]}" rl "${rl[@]}" run.name=text_rl "model.path=$OUT/sft/export" "rollout.tools=[]"
wait_for text_rl
evaluate sft "$OUT/sft/export"  # only now, because the start of the RL runs keeps 16 cores busy
evaluate text_rl "$OUT/text_rl/export"
wait_for tool_rl
evaluate tool_rl "$OUT/tool_rl/export"
wait_for

in_background tool_to_text "$OUT/tool_to_text.json" "${retool[@]}" eval compare "$OUT/eval/text_rl/text_rl_text" "$OUT/eval/tool_rl/tool_rl" --out "$OUT/tool_to_text.json"
in_background tool_to_sft "$OUT/tool_to_sft.json" "${retool[@]}" eval compare "$OUT/eval/sft/sft" "$OUT/eval/tool_rl/tool_rl" --out "$OUT/tool_to_sft.json"
in_background report "$OUT/report.html" "${retool[@]}" report "$OUT/sft" "$OUT/tool_rl" "$OUT/text_rl" --eval "$OUT/eval" --out "$OUT/report.html"
wait_for
finish "$recipe"
