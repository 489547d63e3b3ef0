#!/usr/bin/env bash
# usage: tools/install_torch.sh PYTHON
# Installs the pinned torch for that interpreter, as a CPU build wherever one can be had: the default build for Linux
# x86-64 draws several GB of CUDA libraries that nothing here uses.
set -euo pipefail
python=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=$(sed -n 's/^torch==//p' constraints.txt)

installed=$("$python" -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])' 2>/dev/null || true)
[ "$installed" != "$version" ] || exit 0

pip_install() {
    .venv/bin/python -m pip --python "$python" --quiet --quiet --disable-pip-version-check install --constraint constraints.txt "$@"
}

echo "set-up: installing torch $version (CPU build)"
if pip_install "torch==$version+cpu" 2>/dev/null; then exit 0; fi
echo "set-up: no CPU build where pip looks by default; trying PyTorch's own index"
if pip_install --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu" 2>/dev/null; then
    exit 0
fi
echo "set-up: none there either; installing the default build of torch $version (may be several GB)"
pip_install "torch==$version"
