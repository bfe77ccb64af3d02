# Sourced after nodes.sh by the recipes of several stages: reproduce_retool.sh and gsm8k_gpu1.sh.
: "${OUT:?the folder of everything that the recipe makes}"

# stage NAME RESULT COMMAND...: carries the command out and notes it in OUT/stages/NAME. It is not
# carried out again while RESULT is there and the note holds the same command. A signal to this script
# ends it, too. In a dry run it is shown, and a script shows its own commands.
stage() {
  local name=$1 result=$2 began=$SECONDS
  shift 2
  printf '\n# %s\n' "$*"
  if [ -n "$DRY_RUN" ]; then [ "$1" != bash ] || "$@"; return; fi
  if [ -e "$result" ] && [ "$(cat "$OUT/stages/$name" 2>/dev/null)" = "$*" ]; then
    echo "done before: $result"
    return
  fi
  [ -n "${STAGES_HELD:-}" ] || hold "$OUT/.lock.stages" "$OUT"
  STAGES_HELD=yes
  start "$@"
  wait "${started[-1]}"
  unset 'started[-1]'
  mkdir -p "$OUT/stages"
  printf '%s' "$*" >"$OUT/stages/$name.new"
  mv "$OUT/stages/$name.new" "$OUT/stages/$name"
  echo "$name: $((SECONDS - began)) s"
}
