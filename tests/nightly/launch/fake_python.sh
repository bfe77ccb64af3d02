#!/usr/bin/env bash
# Stands in for PYTHON in tests of the launch scripts: nodes.py is real, the commands that it starts end at once.
# FAKE is a folder. $FAKE/NAME, where a test has written it, is what the command NAME does instead.
# The commands that were called are lines of $FAKE/calls.
words=" $* "
case $words in
  *" launch/nodes.py "*) exec "$REAL_PYTHON" "$@" ;;
  *" sandbox ping "* | *" retool_mcore.sandbox ping "*) exit ;;
  *" retool_mcore.sandbox serve "*) name=service ;;
  *" preflight "*" --cluster "*) name=cluster ;;
  *" preflight "*) name=preflight ;;
  *" ray.scripts.scripts "*) name=ray ;;
  *" launch/rl.py "* | *" launch/sft_mcore.py "*) name=run ;;
  *) echo "fake_python.sh does not know: $*" >&2; exit 99 ;;
esac
echo "$name $$" >>"$FAKE/calls"
[ ! -e "$FAKE/$name" ] || { . "$FAKE/$name"; exit; }
case $name in
  service)
    path=$(sed 's/.* --socket \([^ ]*\) .*/\1/' <<<"$words")
    exec "$REAL_PYTHON" -c "
import os, signal, socket, sys
path = sys.argv[1]
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
signal.signal(signal.SIGTERM, lambda *_: (os.unlink(path), sys.exit()))
print('unix://' + path, flush=True)
signal.pause()" "$path"
    ;;
  ray) echo "Ray runtime started."; exec sleep 100 ;;
esac
