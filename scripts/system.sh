#!/usr/bin/env bash
# System packages: installed when root on Debian or Ubuntu, else named exactly. Beside what slots need, these programs
# (ATROPOS_SYSTEM_PROGRAMS, each with its package: "ip:iproute2 ...") and packages (ATROPOS_SYSTEM_PACKAGES).
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin # where ldconfig is, which an ordinary user may not have
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
missing=()
for one in bwrap:bubblewrap unshare:util-linux git:git cc:gcc ${ATROPOS_SYSTEM_PROGRAMS:-}; do
  command -v "${one%:*}" >/dev/null 2>&1 || missing+=("${one#*:}")
done
compiles() { # a compiler alone doesn't: the C library's files for it are another package
  printf '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' | cc -x c -o "$scratch/program" - >"$scratch/cc" 2>&1
}
compiles || missing+=(libc6-dev)
# not grep -q: it would end before ldconfig has written all, which pipefail takes for a failure
ldconfig -p 2>/dev/null | grep 'libseccomp\.so\.2' >/dev/null || missing+=(libseccomp2)
bash "$(dirname "$0")/uv.sh" --find 2>/dev/null || missing+=(python3-pip)
for extra in ${ATROPOS_SYSTEM_PACKAGES:-}; do
  dpkg -s "$extra" >/dev/null 2>&1 || missing+=("$extra")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  exec 9>"${TMPDIR:-/tmp}/atropos-apt.lock"
  flock 9 # apt-get fails where another one is at work
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$scratch/apt" 2>&1 \
    || { cat "$scratch/apt" >&2; echo "apt-get could not install: ${missing[*]}" >&2; exit 1; }
  compiles || { cat "$scratch/cc" >&2; echo "cc, a C compiler, can't make a program (see above): tasks in C can't be solved" >&2; }
else
  ! command -v cc >/dev/null 2>&1 || cat "$scratch/cc" >&2 # why it makes no program, where it doesn't
  echo "missing system packages: ${missing[*]}" >&2
  echo "on Debian or Ubuntu:  sudo apt-get install ${missing[*]}" >&2
  echo "elsewhere: install the packages that provide these programs, then run make again" >&2
  exit 1
fi
