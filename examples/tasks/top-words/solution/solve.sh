#!/bin/bash
set -e
cd /workspace
cat > topwords.sh <<'SH'
#!/bin/bash
export LC_ALL=C
n=${1:-10}
if ! [[ $n =~ ^[0-9]+$ ]] || ! [[ $n =~ [1-9] ]]; then
  echo "topwords: N must be a positive whole number, not '$n'" >&2
  exit 2
fi
tr -cs 'A-Za-z' '\n' | tr 'A-Z' 'a-z' | grep . | sort | uniq -c | awk '{print $1, $2}' | sort -k1,1nr -k2,2 | sed -n "1,${n}p"
exit 0
SH
chmod +x topwords.sh
./topwords.sh 3 < sample.txt
