#!/usr/bin/env bash
# The code sandbox of one node, any hardware. Prints its URL when it answers, serves until stopped,
# then stops it.
#   bash launch/sandbox.sh [--socket PATH | --host H --port P] [--workers N] [--min-level LEVEL] [--sessions N]
# To run something beside it:  bash launch/sandbox.sh --port 8080 -- bash launch/rl_h200x8.sh
set -euo pipefail
: "${PYTHON:=python}"
options=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do options+=("$1"); shift; done
[ "${1:-}" = "--" ] && shift

first_line=$(mktemp -u)
mkfifo -m 600 "$first_line"
"$PYTHON" -m retool_mcore.sandbox serve "${options[@]}" >"$first_line" &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$first_line"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

read -r url <"$first_line" || { wait "$server"; exit 1; }  # no line: the server told why on stderr
rm -f "$first_line"
"$PYTHON" -m retool_mcore.sandbox ping "$url"
echo "$url"
if [ $# -gt 0 ]; then SANDBOX_URL="$url" "$@"; else wait "$server"; fi
