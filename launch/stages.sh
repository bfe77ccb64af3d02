# Sourced after nodes.sh by the recipes of several stages: reproduce_retool.sh and gsm8k_gpu1.sh.
: "${OUT:?the folder of everything that the recipe makes}"

begun=()  # of each stage that others run beside: name, process, when it began, command

# stage NAME RESULT COMMAND...: carries the command out and notes it in OUT/stages/NAME. It is not
# carried out again while RESULT is there and the note holds the same command. A signal to this script
# ends it, too. In a dry run it is shown, and a script shows its own commands.
stage() {
  local name=$1 result=$2 began=$SECONDS
  shift 2
  is_left "$result" "$@" || return 0
  start "$@"
  wait "${started[-1]}"
  unset 'started[-1]'
  done_with "$name" $began "$*"
}

# beside NAME RESULT COMMAND...: a stage beside others, until `together` has waited for all of them. Each
# of its lines has its name before it, and no bar of progress is drawn over another's.
beside() {
  local name=$1 result=$2
  shift 2
  is_left "$result" "$@" || return 0
  start "$@" > >(exec sed -u "s/^/$name: /") 2>&1
  begun+=("$name" "${started[-1]}" "$SECONDS" "$*")
}

# The first that fails ends the recipe, and with it the others.
together() {
  local i
  while [ ${#begun[@]} -gt 0 ]; do
    for ((i = 0; i < ${#begun[@]}; i += 4)); do
      ! kill -0 "${begun[i + 1]}" 2>/dev/null || continue
      wait "${begun[i + 1]}"
      mapfile -t started < <(printf '%s\n' "${started[@]}" | grep -vx "${begun[i + 1]}")
      done_with "${begun[i]}" "${begun[i + 2]}" "${begun[i + 3]}"
      begun=("${begun[@]:0:i}" "${begun[@]:i + 4}")
      continue 2
    done
    sleep 0.2
  done
}

# is_left RESULT COMMAND...: whether the stage `name` is to be carried out; OUT is this script's then.
is_left() {
  local result=$1
  shift
  printf '\n# %s\n' "$*"
  if [ -n "$DRY_RUN" ]; then
    [ "$1" != bash ] || "$@"
    return 1
  fi
  if [ -e "$result" ] && [ "$(cat "$OUT/stages/$name" 2>/dev/null)" = "$*" ]; then
    echo "done before: $result"
    return 1
  fi
  [ -n "${STAGES_HELD:-}" ] || hold "$OUT/.lock.stages" "$OUT"
  STAGES_HELD=yes
}

# done_with NAME BEGAN COMMAND
done_with() {
  mkdir -p "$OUT/stages"
  printf '%s' "$3" >"$OUT/stages/$1.new"
  mv "$OUT/stages/$1.new" "$OUT/stages/$1"
  echo "$1: $((SECONDS - $2)) s"
}

# finished RECIPE RESULT...: whether the whole recipe, with these words, has ended before and left all of
# its results. finish RECIPE notes it.
finished() {
  local recipe=$1 result
  shift
  [ -z "$DRY_RUN" ] && [ "$(cat "$OUT/stages/recipe" 2>/dev/null)" = "$recipe" ] || return 1
  for result in "$@"; do [ -e "$result" ] || return 1; done
  echo "done before: ${*: -1}"
}
finish() { [ -n "$DRY_RUN" ] || printf '%s' "$1" >"$OUT/stages/recipe"; }
