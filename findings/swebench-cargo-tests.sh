#!/usr/bin/env bash
# swebench 5.0.2 knows a Rust test by its name alone: where a library and a program of its tests/ have each a `tests::empty`, a failed one
# is PASSED once the other passes after it. A `#[should_panic]` test, whose line says so between name and verdict, is no test at all,
# nor are a documentation's examples: no task can ask for one, and a patch that breaks one breaks nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python swebench==5.0.2 ghapi==1.1.1
mkdir -p crate/src crate/tests
cd crate
printf '[package]\nname = "finding"\nedition = "2021"\n' >Cargo.toml
cat >src/lib.rs <<'RUST'
/// ```
/// assert_eq!(finding::double(1), 3);
/// ```
pub fn double(n: i32) -> i32 {
    2 * n
}

#[cfg(test)]
mod tests {
    #[test]
    fn empty() {
        assert_eq!(crate::double(0), 1);
    }

    #[test]
    #[should_panic]
    fn refuses() {}
}
RUST
printf 'mod tests {\n    #[test]\n    fn empty() {}\n}\n' >tests/program.rs
cargo test --no-fail-fast -- --test-threads 1 >../cargo.log 2>&1 || true
cd ..
found=$(grep '^test .*\.\.\. ' cargo.log
  venv/bin/python -c '
from swebench.harness.log_parsers import PARSER_REGISTRY

print(PARSER_REGISTRY["parse_log_cargo"](open("cargo.log").read(), None))')
wanted="test tests::empty ... FAILED
test tests::refuses - should panic ... FAILED
test tests::empty ... ok
test src/lib.rs - double (line 1) ... FAILED
{'tests::empty': 'PASSED'}"
echo "swebench 5.0.2, $(cargo --version | cut -d' ' -f1-2):"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
