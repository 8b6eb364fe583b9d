"""What engines say of a pull: a registry's refusal is told from its trouble, whatever the status that passes it on."""

from __future__ import annotations

import pytest

from atropos.slots.backends.docker.facts import pull_is_denied

REFUSED = {
    "dockerd, Basic": 'Head "http://127.0.0.1:46787/v2/x/y/manifests/1": no basic auth credentials',
    "dockerd, its token server answers 401": 'Head "http://127.0.0.1:46583/v2/x/y/manifests/1": unauthorized: no',
    "dockerd, its token server answers 403": 'Head "http://127.0.0.1:35367/v2/x/y/manifests/1": denied: no',
    "dockerd, a token without the right": "pull access denied for 127.0.0.1:37075/x/y, repository does not exist or may require "
    "'docker login': denied: requested access to the resource is denied",
    "dockerd, 404 with HTML": "error parsing HTTP 404 response body: invalid character '<' looking for beginning of value: "
    '"<html>nothing</html>"',
    "Podman, Basic": "initializing source docker://127.0.0.1:35169/x/y:1: reading manifest 1 in 127.0.0.1:35169/x/y: unauthorized",
    "Podman, its token server answers 403": "initializing source docker://127.0.0.1:35049/x/y:1: Requesting bearer token: invalid "
    "status code from registry 403 (Forbidden)",
    "Podman, 404 with HTML": "initializing source docker://127.0.0.1:41959/x/y:1: reading manifest 1 in 127.0.0.1:41959/x/y: "
    "StatusCode: 404, <html>nothing</html>",
}
TROUBLE = {
    "dockerd, 503": "received unexpected HTTP status: 503 Service Unavailable",
    "dockerd, 429 with HTML": "error parsing HTTP 429 response body: invalid character '<' looking for beginning of value: "
    '"<html>nothing</html>"',
    "dockerd, nobody listens": 'Get "http://127.0.0.1:1/v2/": dial tcp 127.0.0.1:1: connect: connection refused',
    "containerd, plain HTTP": 'failed to do request: Head "https://127.0.0.1:40559/v2/x/y/manifests/1": tls: first record does not '
    "look like a TLS handshake",
    "Podman, 503": "initializing source docker://127.0.0.1:45819/x/y:1: reading manifest 1 in 127.0.0.1:45819/x/y: received "
    "unexpected HTTP status: 503 Service Unavailable",
}


@pytest.mark.parametrize("said", REFUSED.values(), ids=REFUSED)
def test_refusal_is_no_trouble(said):
    assert pull_is_denied(said)


@pytest.mark.parametrize("said", TROUBLE.values(), ids=TROUBLE)
def test_trouble_refuses_nothing(said):
    assert not pull_is_denied(said)
