# Functions for recipes with several stages; reproduce_retool.sh and gsm8k_gpu1.sh source this file.
: "${OUT:?set it to the folder for all output of the recipe}" "${PYTHON:=python}" "${DRY_RUN:=}" "${LOCK_WAIT_S:=30}"

started=()  # pids of the running stages; each leads a process group
begun=()    # per parallel stage: name, pid, start time, command
checks=()   # pids of the running checks

fail() { echo "error: $*" >&2; exit 2; }

# stage NAME RESULT COMMAND...: runs the command and records it in OUT/stages/NAME. Later starts skip the
# stage if RESULT exists and the recorded command is the same. A dry run only prints the command; if it is
# a script, its own dry run prints the script's commands.
stage() {
  local name=$1 result=$2 began=$SECONDS
  shift 2
  must_run "$result" "$@" || return 0
  start "$@"
  wait_for_pid "${started[-1]}"
  done_with "$name" $began "$*"
}

# in_background NAME RESULT COMMAND...: starts a parallel stage; `wait_for` waits for it. Each line of its
# output is prefixed with its name, which also disables progress bars.
in_background() {
  local name=$1 result=$2
  shift 2
  must_run "$result" "$@" || return 0
  start_prefixed "$name" "$@"
  begun+=("$name" "${started[-1]}" "$SECONDS" "$*")
}

# wait_for [NAME...]: waits for these parallel stages, or for all. The first stage that fails stops the recipe and
# all other stages, whether or not it is waited for.
wait_for() {
  local i waiting=1
  while [ -n "$waiting" ]; do
    waiting=
    for ((i = 0; i < ${#begun[@]}; i += 4)); do
      if kill -0 "${begun[i + 1]}" 2>/dev/null; then
        [[ $# -gt 0 && " $* " != *" ${begun[i]} "* ]] || waiting=1
        continue
      fi
      wait_for_pid "${begun[i + 1]}"
      done_with "${begun[i]}" "${begun[i + 2]}" "${begun[i + 3]}"
      begun=("${begun[@]:0:i}" "${begun[@]:i + 4}")
      waiting=1
      break
    done
    [ -z "$waiting" ] || sleep 0.2
  done
}

# check NAME COMMAND...: starts a command without a record, such as one that writes no files; `wait_for_checks` waits for
# all of them. Each line of its output is prefixed with its name. A check that fails stops the recipe.
check() {
  start_prefixed "$@"
  checks+=("${started[-1]}")
}
wait_for_checks() {
  local pid
  for pid in "${checks[@]}"; do wait_for_pid "$pid"; done
  checks=()
}

# must_run RESULT COMMAND...: whether stage `name` still has to run. The first stage that has to run locks OUT;
# a dry run prints the command and runs a script's own dry run.
must_run() {
  local result=$1
  shift
  printf '\n# %s\n' "$*"
  if [ -n "$DRY_RUN" ]; then
    [ "$1" != bash ] || "$@"
    return 1
  fi
  if [ -e "$result" ] && [ "$(cat "$OUT/stages/$name" 2>/dev/null)" = "$*" ]; then
    echo "already done: $result"
    return 1
  fi
  [ -n "${lock:-}" ] || lock_out
}

# The stages inherit the lock, so OUT is released when the last of them exits.
lock_out() {
  mkdir -p "$OUT"
  exec {lock}>>"$OUT/.lock.stages"
  flock --wait "$LOCK_WAIT_S" "$lock" & wait $! ||  # in the background, so that a signal interrupts the wait
    fail "$OUT is in use by process $(cat "$OUT/.lock.stages"). Wait for it, stop it, or set another OUT."
  echo "$$ on $HOSTNAME" >"$OUT/.lock.stages"
}

# done_with NAME BEGAN COMMAND
done_with() {
  mkdir -p "$OUT/stages"
  printf '%s' "$3" >"$OUT/stages/$1.new"
  mv "$OUT/stages/$1.new" "$OUT/stages/$1"
  echo "$1: $((SECONDS - $2)) s"
}

# finished RECIPE RESULT...: whether this recipe, with the same arguments, has finished and all of its
# results still exist. finish RECIPE records that it has finished.
finished() {
  local recipe=$1 result
  shift
  [ -z "$DRY_RUN" ] && [ "$(cat "$OUT/stages/recipe" 2>/dev/null)" = "$recipe" ] || return 1
  for result in "$@"; do [ -e "$result" ] || return 1; done
  echo "already done: ${*: -1}"
}
finish() { [ -n "$DRY_RUN" ] || printf '%s' "$1" >"$OUT/stages/recipe"; }

# start COMMAND...: runs the command in the background in a new process group, which gets SIGTERM when this
# script dies.
start() {
  setsid setpriv --pdeathsig TERM -- "$@" &
  started+=("$!")
}

start_prefixed() {
  local name=$1
  shift
  start "$@" > >(exec sed -u "s/^/$name: /") 2>&1
}
wait_for_pid() {
  wait "$1"
  mapfile -t started < <(printf '%s\n' "${started[@]}" | grep -vx "$1")
}

# Sends SIGTERM to each stage and waits for it to exit. A run saves first; a second signal stops it at once.
stop_started() {
  trap - EXIT
  [ ${#started[@]} -gt 0 ] || return 0
  trap 'kill -TERM "${started[@]}" 2>/dev/null || true' INT TERM
  kill -TERM "${started[@]}" 2>/dev/null || true
  local pid
  for pid in "${started[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    kill -KILL -- "-$pid" 2>/dev/null || true  # its remaining processes
  done
}
trap stop_started EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
