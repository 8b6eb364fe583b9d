"""A machine with cgroup v2 alone, and the tests of limits in it: `cgroup2.py [--kernel old] [PYTEST ARGUMENTS]`.

`--kernel old` boots Linux 6.1, whose tmpfs has no user xattrs: there, start must refuse by name, or keep volumes on
disk.
"""

from __future__ import annotations

import argparse
import sys

from virtual_machine import X86_64, Machine, pytest

MACHINE = Machine(
    "cgroup2",
    X86_64,
    packages="bubblewrap busybox-static e2fsprogs gcc git libc6-dev libseccomp2 make procps python3 uidmap xz-utils",
    kernels={  # 6.12 and 6.1
        "new": ("trixie", "linux-image-cloud-amd64"),
        "old": ("bookworm", "linux-image-cloud-amd64"),
    },
)
TESTS = (
    "tests/limits tests/unit/sandbox tests/truths/test_truth_03* tests/truths/test_truth_06* "
    "tests/truths/test_truth_08* tests/conformance/test_slots.py"
)
OLD_TESTS = "tests/limits/test_old_kernel.py"


def main() -> int:
    parser = argparse.ArgumentParser(description="the tests of limits on a machine with cgroup v2")
    parser.add_argument("--kernel", choices=sorted(MACHINE.kernels), default="new", help="new: Linux 6.12; old: 6.1")
    parser.add_argument("--command", help="a shell command to run in the machine instead of pytest")
    options, arguments = parser.parse_known_args()
    tests = OLD_TESTS if options.kernel == "old" else TESTS
    return MACHINE.run(options.command or pytest(arguments, tests, timeout_s=1800), options.kernel)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
