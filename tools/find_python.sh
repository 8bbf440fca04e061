#!/bin/sh
# Print the first Python 3.11 or newer that can make a virtual environment: $PYTHON, then PATH, then pyenv's versions.
for candidate in "$PYTHON" python3 python3.12 python3.13 python3.11 python3.14 "$HOME"/.pyenv/versions/3.1[1-9]*/bin/python3; do
  [ -n "$candidate" ] || continue
  found=$("$candidate" -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11); print(sys.executable)' 2>/dev/null) || {
    [ "$candidate" = "$PYTHON" ] && { echo "PYTHON=$PYTHON is not a Python 3.11 or newer with venv; unset it or point it at one" >&2; exit 1; }
    continue
  }
  echo "$found"
  exit 0
done
echo "no Python 3.11 or newer with venv was found; install one or pass PYTHON=/path/to/python" >&2
exit 1
