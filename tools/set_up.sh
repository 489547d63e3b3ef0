#!/usr/bin/env bash
# Makes .venv with everything that the other make targets need. Started by make when .venv is missing or older than
# the files that describe it; the stamp given as first argument is written last, so that an interrupted run is redone.
# PYTHON=... chooses the interpreter.
set -euo pipefail
trap 'exit 130' INT TERM
stamp=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

supported() { # is $1 a Python that the five packages accept?
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3}; do
        if supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "set-up: expected Python 3.10, 3.11 or 3.12 (tried: ${PYTHON:-python3.11 python3.12 python3.10 python3})," \
        "found none. Install one, or name it: make PYTHON=/path/to/python3.11" >&2
    return 1
}

usable() { # is .venv there, on a supported Python, and not left half-made by an interrupted run?
    [ ! -e "$unfinished" ] && supported .venv/bin/python && .venv/bin/python -m pip --version
}

unfinished=.venv/set-up-unfinished
rm -f "$stamp"
if ! usable >/dev/null 2>&1; then
    python=$(find_python)
    echo "set-up: creating .venv with $("$python" --version)"
    if ! "$python" -m venv --clear .venv; then
        echo "set-up: $python cannot create a virtual environment (on Debian: apt-get install python3-venv)" >&2
        exit 1
    fi
fi
touch "$unfinished"

pip() { .venv/bin/python -m pip --quiet --quiet "$@"; }
pip install "$(grep '^pip==' constraints.txt)"
tools/install_torch.sh .venv/bin/python
echo "set-up: installing tools and the five packages"
pip install --constraint constraints.txt --group dev
editables=()
for package in packages/*/; do editables+=(--editable "$package"); done
pip install --constraint constraints.txt --no-build-isolation "${editables[@]}"
pip check

rm "$unfinished"
touch "$stamp"
echo "set-up: done"
