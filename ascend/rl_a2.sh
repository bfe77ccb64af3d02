#!/usr/bin/env bash
# RL of Qwen2.5-7B on one Atlas 800T A2 node:
#   bash ascend/rl_a2.sh [section.key=value ...] [--dry-run]
# 32B on four: the same on each node, with CONFIG=configs/rl_qwen2.5_32b_a2x32.toml, NODE_RANK and
# HEAD_IP.
# Killed? The same command continues from the last complete checkpoint; with RESTARTS=3 by itself.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python}" "${CONFIG:=configs/rl_qwen2.5_7b_a2x8.toml}"
source launch/env_a2.sh
source launch/nodes.sh
prepare launch/rl.py "$CONFIG" "$@"
start_sandbox "$CONFIG" "${KEYS[@]}"
join_nodes "$CONFIG" "${KEYS[@]}"                             # node 0 drives; the others serve until it leaves
run "$PYTHON" launch/rl.py "$CONFIG" "sandbox.where=[\"$SANDBOX_URL\"]" "${KEYS[@]}" "${IN_SANDBOX[@]}"
