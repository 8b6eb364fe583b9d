"""An arm64 machine, and slots in it: `arm64.py [--kernel 16k] [PYTEST ARGUMENTS]`.

The conformance of the local backend, the attack programs, limits, and the truths that are about slots. `--kernel 16k`
boots one whose pages have 16 KiB: programs and kernel count memory in other units there.
"""

from __future__ import annotations

import argparse
import sys

from virtual_machine import AARCH64, Machine, pytest

MACHINE = Machine(
    "arm64",
    AARCH64,
    packages="bubblewrap busybox-static e2fsprogs gcc git iproute2 libc6-dev libseccomp2 make "
    "procps python3 uidmap xz-utils zstd",
    kernels={"4k": ("trixie", "linux-image-cloud-arm64"), "16k": ("trixie", "linux-image-arm64-16k")},
    boot_s=600,
    run_s=36_000,
)
TESTS = (
    "tests/unit/sandbox tests/conformance/test_slots.py tests/conformance/test_views.py "
    "tests/security/test_attack_programs.py tests/security/test_races.py tests/limits "
    "tests/truths/test_truth_03* tests/truths/test_truth_06* tests/truths/test_truth_08* tests/truths/test_truth_10*"
)


def main() -> int:
    parser = argparse.ArgumentParser(description="slots on an arm64 machine")
    parser.add_argument("--kernel", choices=MACHINE.kernels, default="4k", help="by the size of its pages")
    parser.add_argument("--command", help="a shell command to run in the machine instead of pytest")
    options, arguments = parser.parse_known_args()
    return MACHINE.run(options.command or pytest(arguments, TESTS, timeout_s=3600), options.kernel, slowness="30")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
