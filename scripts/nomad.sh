#!/usr/bin/env bash
# Prints the path of a nomad binary of the pinned version; builds it with Go into ~/.cache/atropos where there is none.
# `nomad.sh --find` builds nothing: it fails where there is none.
# (No package registry carries Nomad's binary. Version 2 has no installable Go module, so 1.11.3 is what is pinned.)
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(awk '$1 == "github.com/hashicorp/nomad" { print substr($2, 2) }' nomad/build/go.mod)
cache=${ATROPOS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/atropos}
binary=$cache/nomad-$version

find_binary() { # prints it and ends this script when there is one
  local candidate
  for candidate in "${ATROPOS_NOMAD:-}" "$binary" "$(command -v nomad || true)"; do
    if [ -n "$candidate" ] && [ -x "$candidate" ] && "$candidate" version 2>/dev/null | grep -q "^Nomad v$version"; then
      echo "$candidate"
      exit 0
    fi
  done
}
find_binary
[ "${1:-}" != --find ] || exit 1

PATH=$PATH:/usr/local/go/bin
if ! command -v go >/dev/null || ! command -v cc >/dev/null; then
  ATROPOS_SYSTEM_PACKAGES="golang-go gcc libc6-dev ca-certificates" bash scripts/system.sh >&2 \
    || { echo "Nomad $version is not installed, and building it needs Go and a C compiler" >&2; exit 1; }
fi
mkdir -p "$cache"
exec 9>"$cache/nomad.lock"
if ! flock --nonblock 9; then
  echo "Nomad $version is being built already: waiting for that" >&2
  flock 9
  find_binary
fi
rm -f "$binary".part* # of a build that was killed
echo "building Nomad $version with Go (3 minutes once; then it is kept in $cache)" >&2
part=$binary.part$$
scratch=$(mktemp -d)
log=$scratch/log
trap 'rm -rf "$part" "$scratch"' EXIT
if [ -z "$(go env GOTOOLCHAIN)" ]; then # Go before 1.21 (Debian 12) fetches no other one: here is what newer ones do
  toolchain=golang.org/toolchain@v0.0.1-go$(awk '$1 == "go" { print $2 }' nomad/build/go.mod).$(go env GOOS)-$(go env GOARCH)
  (cd "$scratch" && go mod init toolchain && go mod download "$toolchain") >"$log" 2>&1 \
    || { tail -n 30 "$log" >&2; echo "the Go that Nomad needs could not be fetched" >&2; exit 1; }
  toolchain=$(go env GOMODCACHE)/$toolchain
  chmod -R +x "$toolchain/bin" "$toolchain/pkg/tool" # of a module no file can be executed
  PATH=$toolchain/bin:$PATH
fi
# GOTOOLCHAIN: an older Go, as distributions have it, fetches the one that go.mod names
# GOGC: the compiler collects its garbage more rarely, which builds in an eighth less time
(cd nomad/build && GOGC=400 CGO_ENABLED=1 GOFLAGS=-mod=readonly GOTOOLCHAIN=auto go build -trimpath -tags release -ldflags '-s -w' -o "$part" github.com/hashicorp/nomad) \
  >"$log" 2>&1 || { tail -n 30 "$log" >&2; echo "Nomad could not be built" >&2; exit 1; }
mv "$part" "$binary"
echo "$binary"
