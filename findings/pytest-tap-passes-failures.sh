#!/usr/bin/env bash
# pytest-tap 3.5 with pytest 9.1.1: a failed test is "ok … # TODO unexpected success" where its traceback, source lines included, has the
# words "Unexpected success", and a test whose fixture fails after it is "ok". pytest fails both. Each subtest is a line with
# its test's name, so that the plan is too short, and one of the lines of the test whose subtest failed says "ok".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q pytest==9.1.1 pytest-tap==3.5 tap.py==3.2.1
cat >test_login.py <<'PYTHON'
import pytest

@pytest.fixture
def server():
    yield
    raise RuntimeError("did not stop")

def test_wrong_password():
    assert 200 == 401, "Unexpected success with a wrong password"

def test_right_password(server):
    pass

def test_users(subtests):
    for user in "root", "guest":
        with subtests.test(user=user):
            assert user == "root"
PYTHON
found=$({ venv/bin/pytest --tap-stream test_login.py || true; } | grep -vE '^#' && { venv/bin/pytest test_login.py -q || true; } | tail -n 1 | sed 's/ in .*//')
wanted="1..3
ok 1 test_login.py::test_wrong_password # TODO unexpected success
ok 2 test_login.py::test_right_password
ok 3 test_login.py::test_users
not ok 4 test_login.py::test_users
ok 5 test_login.py::test_users
3 failed, 1 passed, 1 error, 1 subtests passed"
echo "pytest-tap 3.5:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
