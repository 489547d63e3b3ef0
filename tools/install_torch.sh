#!/usr/bin/env bash
# usage: tools/install_torch.sh PYTHON
# Installs the pinned torch for that interpreter, as a CPU build wherever one can be had: the default build for Linux
# x86-64 draws several GB of CUDA libraries that nothing here uses.
set -euo pipefail
trap 'exit 130' INT TERM # pip would report an interrupt as any other failure
python=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=$(sed -n 's/^torch==//p' constraints.txt)

installed=$("$python" -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])' 2>/dev/null || true)
[ "$installed" != "$version" ] || exit 0

pip_install() {
    .venv/bin/python -m pip --python "$python" --quiet --quiet --disable-pip-version-check \
        install --constraint constraints.txt "$@"
}

cpu_build="torch==$version+cpu"
for index in "" "--retries=1 --extra-index-url=https://download.pytorch.org/whl/cpu"; do
    # shellcheck disable=SC2086 # several options or none
    if pip_install $index --dry-run --no-deps "$cpu_build" 2>/dev/null; then
        echo "set-up: installing torch $version (CPU build)"
        pip_install $index "$cpu_build"
        exit
    fi
done
echo "set-up: no CPU build of torch $version to be had; installing the default build (may be several GB)"
pip_install "torch==$version"
