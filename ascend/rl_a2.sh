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
exec "$PYTHON" launch/nodes.py rl "$CONFIG" "$@"
