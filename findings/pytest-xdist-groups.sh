#!/usr/bin/env bash
# pytest-xdist 3.8.0 with pytest 9.2.0: `--dist loadgroup` sends tests of one `xdist_group` to several workers, without a word. xdist writes
# the group into a private field of a test, from which pytest 9.2 no longer takes the test's id; with 9.1.1 each group has its worker.
# Tests that share a server or a port then run side by side, and fail now and then.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >test_shared.py <<'PYTHON'
import os

import pytest

@pytest.mark.xdist_group("one server")
@pytest.mark.parametrize("number", range(40))
def test_shared(number):
    with open("workers", "a") as workers:
        workers.write(os.environ["PYTEST_XDIST_WORKER"] + "\n")
PYTHON
found=
for version in 9.1.1 9.2.0; do
  python3 -m venv "venv-$version"
  "venv-$version/bin/pip" install -q "pytest==$version" pytest-xdist==3.8.0 execnet==2.1.2
  rm -f workers
  "venv-$version/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist loadgroup test_shared.py >/dev/null
  found+="pytest $version: a group ran in $(sort -u workers | wc -l) of 2 workers"$'\n'
done
wanted="pytest 9.1.1: a group ran in 1 of 2 workers
pytest 9.2.0: a group ran in 2 of 2 workers"
echo "pytest-xdist 3.8.0:"$'\n'"$found"
[ "${found%$'\n'}" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
