#!/bin/bash
set -e
cd /workspace
cat > rotate.sh <<'SH'
#!/bin/bash
set -euo pipefail
fail() { echo "rotate.sh: $1" >&2; exit 1; }
[ $# -eq 3 ] || fail "usage: rotate.sh SOURCE STORE KEEP"
source=$1 store=$2 keep=$3
[ -d "$source" ] || fail "'$source' is not a folder"
[[ $keep =~ ^[1-9][0-9]*$ ]] || fail "KEEP must be a positive whole number, not '$keep'"
mkdir -p -- "$store"
numbers() {
  find "$store" -mindepth 1 -maxdepth 1 -type f -name 'backup-*.tar.gz' -printf '%f\n' |
    sed -nE 's/^backup-([1-9][0-9]*)\.tar\.gz$/\1/p' | sort -n
}
last=$(numbers | tail -n 1)
new="$store/backup-$((${last:-0} + 1)).tar.gz"
part=$(mktemp "$store/.new-XXXXXX")
trap 'rm -f -- "$part"' EXIT
full=$(cd -- "$source" && pwd)
tar -czf "$part" -C "$(dirname -- "$full")" -- "$(basename -- "$full")"
mv -- "$part" "$new"
numbers | head -n "-$keep" | while read -r number; do
  rm -- "$store/backup-$number.tar.gz"
done
printf '%s\n' "$new"
SH
chmod +x rotate.sh
./rotate.sh "my project" /tmp/store 2
