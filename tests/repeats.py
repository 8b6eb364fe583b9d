"""How long a run of the tests is."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("ATROPOS_FAULTS", "1"))
"""How often each fault is repeated; above 1 rarer ones come too."""
