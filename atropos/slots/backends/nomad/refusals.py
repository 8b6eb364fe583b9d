"""Errors of Nomad and of TLS as one line that names the setting and the cure.

The settings are the NOMAD_* variables of Nomad's own command line.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from http import HTTPStatus

from atropos.errors import BackendUnavailable
from atropos.slots.backends.nomad.access import NomadAccess

CAPABILITIES = {
    "read the job": "read-job",
    "parse the job": "submit-job",
    "register the job": "submit-job",
    "scale the job": "submit-job",
    "stop the job": "submit-job",
    "list allocations": "read-job",
    "stop an allocation": "alloc-lifecycle",
    "read evaluations": "read-job",
    "read the variable": (
        "read on the variable nomad/jobs/<sandbox_job_id>, where nomad/policy.hcl has nomad/jobs/atropos-*"
    ),
    "write the variable": "write on the variable nomad/jobs/<sandbox_job_id>",
    "delete the variable": "destroy on the variable nomad/jobs/<sandbox_job_id>",
}
"""What a token's policy must grant for each request; nomad/policy.hcl has all of it."""
X509_HAS_EXPIRED, X509_HOSTNAME, X509_IP = 10, 62, 64
"""Verification results of OpenSSL (x509_vfy.h)."""


class NomadRefused(BackendUnavailable):
    """Nomad answered with an error; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class JobStopped(BackendUnavailable):
    """A person or another client has stopped the job, which stays stopped."""

    retryable = False


class NomadMisconfigured(NomadRefused):
    """A NOMAD_* setting is wrong, so that a retry can't help; the message names it and the cure."""

    retryable = False

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message, status)


def from_proxy(status: int, reason: str) -> bool:
    """Whether an error answer is of a proxy in front of Nomad, which sends no HTML and says what it has not found."""
    nowhere = reason == "404 page not found" or not reason.endswith("not found")
    return reason.startswith("<") or (status == HTTPStatus.NOT_FOUND and nowhere)


def refused(access: NomadAccess, what: str, status: int, reason: str) -> NomadRefused:
    """An error answer, other than Nomad's own 401 and 403 (see `denied`).

    A proxy's has the status of a bad gateway: its 404, while it finds no Nomad, says nothing of a job or an allocation.
    """
    reason = reason.strip()
    if from_proxy(status, reason):
        title = re.search(r"<title>\s*([^<]+?)\s*</title>", reason, re.IGNORECASE)
        summary = title[1] if title else f"status {status}"
        text = f"a proxy answers in place of Nomad at {access.shown} to a request to {what}: {summary}"
        return NomadRefused(text, HTTPStatus.BAD_GATEWAY)
    if "HTTP request to an HTTPS server" in reason:
        return NomadMisconfigured(
            f"NOMAD_ADDR: {access.shown} speaks TLS; write https:// (and set NOMAD_CACERT where its CA is your own)",
            status,
        )
    if "No path to region" in reason:
        return NomadMisconfigured(
            f"NOMAD_REGION: the cluster at {access.shown} knows no region {access.region!r}; "
            "`nomad server members` lists those it has",
            status,
        )
    if "nonexistent namespace" in reason or "Namespace not found" in reason:
        return missing_namespace(access, status)
    text = "; ".join(line.strip(" *") for line in reason.splitlines() if line.strip()) or f"status {status}"
    return NomadRefused(f"Nomad refused to {what}: {text}", status)


def missing_namespace(access: NomadAccess, status: int) -> NomadMisconfigured:
    """The namespace doesn't exist."""
    return NomadMisconfigured(
        f"NOMAD_NAMESPACE: the cluster at {access.shown} has no namespace {access.namespace!r}; "
        f"`nomad namespace apply {access.namespace}` creates it",
        status,
    )


def denied(access: NomadAccess, what: str, status: int, known: str | None) -> NomadMisconfigured:
    """Nomad's 401 or 403.

    Args:
        access: with the token.
        what: the request, of CAPABILITIES; others need any capability in the namespace.
        status: the HTTP status.
        known: the token's name and policies as Nomad shows them; None: Nomad knows no such token.
    """
    if not access.token:
        text = "NOMAD_TOKEN is not set, and this cluster asks for one: make a token with nomad/policy.hcl"
    elif known is None:
        text = (
            f"NOMAD_TOKEN is no token of the cluster at {access.shown} (mistyped, expired, deleted, or of another "
            "region): make one with nomad/policy.hcl"
        )
    else:
        need = CAPABILITIES.get(what)
        lacks = f"may not {what} there: it needs {need}" if need else "may do nothing there"
        text = (
            f"NOMAD_TOKEN, NOMAD_NAMESPACE={access.namespace}: {known} {lacks}; give it "
            "nomad/policy.hcl for that namespace, or set NOMAD_NAMESPACE to one that it is for"
        )
    return NomadMisconfigured(f"{text} (docs/cluster.md)", status)


def unreachable(access: NomadAccess, error: object) -> BackendUnavailable:
    """A request without an answer."""
    # Only real faults of TLS are mistakes in a setting.
    closed = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # no errors of TLS: an agent ends so, or a balancer without one
    faults = (each for each in _chain(error) if isinstance(each, ssl.SSLError) and not isinstance(each, closed))
    if (fault := next(faults, None)) is None:
        reason = _innermost(error)
        return BackendUnavailable(f"Nomad does not answer at {access.shown} (nomad_address or NOMAD_ADDR): {reason}")
    words = str(fault).upper()
    if isinstance(fault, ssl.SSLCertVerificationError):
        return NomadMisconfigured(_uncertified(access, fault))
    if "WRONG_VERSION_NUMBER" in words or "HTTP_REQUEST" in words or "RECORD_LAYER_FAILURE" in words:
        return NomadMisconfigured(f"NOMAD_ADDR: {access.shown} speaks no TLS; write http:// there")
    if "ALERT" in words:
        certificate = f"refuses {access.client_cert}" if access.client_cert else "asks for one, and none is set"
        return NomadMisconfigured(
            f"NOMAD_CLIENT_CERT: {access.shown} accepts only clients with a certificate of the cluster's CA, and "
            f"{certificate}; set NOMAD_CLIENT_CERT and NOMAD_CLIENT_KEY (`nomad tls cert create -cli` makes them)"
        )
    return NomadMisconfigured(f"NOMAD_ADDR: no TLS connection to {access.shown}: {fault}")


def _uncertified(access: NomadAccess, fault: ssl.SSLCertVerificationError) -> str:
    """Why the agent's certificate was refused."""
    if fault.verify_code in {X509_HOSTNAME, X509_IP}:
        return (
            f"NOMAD_TLS_SERVER_NAME: {fault.verify_message.rstrip('.')}; set it to a name in the certificate of "
            f"{access.shown} (as a rule server.<region>.nomad or client.<region>.nomad)"
        )
    if fault.verify_code == X509_HAS_EXPIRED:
        return f"the certificate of {access.shown} has expired: renew it on the agents"
    source = access.cacert or access.capath
    name = "NOMAD_CACERT" if access.cacert or not access.capath else "NOMAD_CAPATH"
    how = f"{source} does not vouch" if source else "it is not set, and none of this machine's CAs vouches"
    return (
        f"{name}: {how} for the certificate of {access.shown} ({fault.verify_message}); "
        "set it to the file with the cluster's CA"
    )


def _chain(error: object) -> Iterator[BaseException]:
    """An exception and its causes, outermost first; libraries store causes in several places."""
    seen: set[int] = set()
    queue: list[object] = [error]
    # Bounded, as exceptions may name each other in a circle.
    while queue and len(seen) < 50:
        each = queue.pop(0)
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        queue += [*each.args, getattr(each, "reason", None), getattr(each, "os_error", None)]
        queue += [getattr(each, "certificate_error", None), each.__cause__, each.__context__]


def _innermost(error: object) -> str:
    """The system's message, or that of TLS, where there is one (`Connection refused`), without the layers around it."""
    for each in _chain(error):
        if isinstance(each, OSError) and each.strerror and type(each).__module__ in {"builtins", "ssl"}:
            return each.strerror
    return str(error) or type(error).__name__
