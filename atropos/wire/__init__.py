"""Messages between a client and a sandbox server: one definition for both ends.

Every message is a frozen pydantic model that refuses unknown fields. Bytes travel as base64 in JSON.
One WebSocket (`/v1/stream`) carries frames: a frame is a JSON array of messages, each with its `kind`. HTTP carries
leases, snapshots, health, capabilities and metrics, and `POST /v1/leases/{id}/calls` the same calls for use with curl.
"""

from __future__ import annotations

from atropos.wire.base import *
from atropos.wire.frames import *
from atropos.wire.limits import *
from atropos.wire.operations import *
from atropos.wire.requests import *
from atropos.wire.results import *
from atropos.wire.secrets import *
