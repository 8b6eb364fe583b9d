"""Registries: manifests, and blobs as they come. Standard library only.

Sources: OCI distribution specification 1.1; Docker Registry, token authentication; containers-auth.json(5);
containers-certs.d(5).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import IO

from atropos.images import login
from atropos.images.manifests import MANIFESTS, MAX_JSON_BYTES, objects, parse
from atropos.images.untrusted import ImageRefused

# For each read, not for a whole blob: a large one may take long, as long as it comes.
SILENT_S = 30.0
"""Longest pause of a registry before it counts as one that broke off."""
PIECE_BYTES = 1 << 18
_BROKE_OFF = (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_API_HOSTS = {"docker.io": "registry-1.docker.io"}
_HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.UnknownHandler,
)
"""Those of `build_opener` but FTP, files and data, where a registry might lead."""
_CERTIFICATES = ("/etc/containers/certs.d", "/etc/docker/certs.d")


class _Momentary(Exception):
    """What may be over in a moment: a registry that is busy."""


@dataclass
class _Repository:
    """Where a repository may be.

    Attributes:
        host: of the registry.
        path: the repository's name.
        opener: makes requests, by the environment's proxies and this host's certificates.
        urls: beginnings of its API's addresses; those that don't work are left out once one does.
        authorization: what its requests say.
    """

    host: str
    path: str
    opener: urllib.request.OpenerDirector
    urls: list[str]
    authorization: dict[str, str] = field(default_factory=dict[str, str])


class Registry:
    """One repository.

    Args:
        name: of an image, with its host.
        mirrors: a host: the host, and path, that is asked first.
        insecure: hosts that are spoken to without TLS, or whatever their certificate.
        auth_file: credentials; None: the user's own.
        pauses_s: pauses before a registry that answered with 5xx, or broke off, is asked again.

    Raises:
        ImageRefused: by its methods: no such image, no access, no registry.
    """

    def __init__(
        self, name: str, mirrors: dict[str, str], insecure: list[str], auth_file: str | None, pauses_s: list[float]
    ) -> None:
        self._auth_file = auth_file
        self._pauses_s = pauses_s
        host, _, rest = name.partition("/")
        path, _, digest = rest.partition("@")
        path, _, tag = path.partition(":")
        self.reference = digest or tag
        mirror, _, prefix = mirrors.get(host, "").partition("/")
        # Each with an opener and a token of its own: a mirror must not learn what the registry was told.
        self._places = [_place(host, path, insecure=host in insecure)]
        if mirror:
            self._places.insert(0, _place(mirror, f"{prefix}/{path}".lstrip("/"), insecure=mirror in insecure))

    # ---------------------------------------------------------------------------------------------------------- reading

    def manifest(self, reference: str) -> bytes:
        """A manifest or an index by its tag or digest; from the mirror, if that has it."""
        for place in self._places[:-1]:
            # Whatever is wrong with the mirror: the registry itself has the last word.
            with contextlib.suppress(ImageRefused):
                manifest = self._whole(place, f"manifests/{reference}")
                # The layers come from where the manifest does; a mirror that has the one may have cleared away the
                # others.
                self._places = [place]
                return manifest
        return self._whole(self._places[-1], f"manifests/{reference}")

    def small(self, digest: str) -> bytes:
        """A configuration by its digest."""
        return self._whole(self._places[0], f"blobs/sha256:{digest}")

    def blob(self, digest: str, size: int, take: Callable[[bytes], bool]) -> None:
        """Have a blob taken as it comes, until `take` wants no more; after a connection that broke, from there on."""
        at = tried_at = 0
        pauses = iter(self._pauses_s)
        while at < size:
            # Something came since the last try, so the next failure is another one.
            if at > tried_at:
                tried_at, pauses = at, iter(self._pauses_s)
            try:
                with self._opened(self._places[0], f"blobs/sha256:{digest}", at) as response:
                    # 200 instead of 206: it ignores ranges (RFC 9110, section 14.2), and begins anew; what was taken is
                    # skipped.
                    known = at if response.status == HTTPStatus.OK else 0
                    # read1 gives what is there; `read` would wait until a piece is full.
                    while piece := response.read1(PIECE_BYTES):
                        new, known = piece[known:], max(0, known - len(piece))
                        at += len(new)
                        # The manifest's size is what the store made room for.
                        if at > size:
                            raise ImageRefused(f"layer {digest[:12]} is larger than its manifest says")
                        if not take(new):
                            return
                # http.client tells a short answer by the length that it announced; one without a length just ends.
                if at < size:
                    raise _Momentary(f"layer {digest[:12]} ended after {at} of {size} bytes")
            except (_Momentary, *_BROKE_OFF) as error:
                _pause(pauses, error)

    def _whole(self, place: _Repository, path: str) -> bytes:
        pauses = iter(self._pauses_s)
        while True:
            try:
                with self._opened(place, path) as response:
                    data = response.read(MAX_JSON_BYTES + 1)
                    # http.client's `read` with an amount doesn't raise IncompleteRead; `length` is what is still
                    # missing.
                    if response.length and len(data) <= MAX_JSON_BYTES:
                        raise _Momentary(f"{path} ended after {len(data)} bytes")
            except (_Momentary, *_BROKE_OFF) as error:
                _pause(pauses, error)
                continue
            _, _, digest = path.partition("/sha256:")
            if digest and hashlib.sha256(data).hexdigest() != digest:
                raise ImageRefused(f"{path} is not what its digest says")
            return data

    # --------------------------------------------------------------------------------------------------------- requests

    def _opened(self, place: _Repository, path: str, start: int = 0) -> http.client.HTTPResponse:
        """The answer to a request, where it is none of an error."""
        headers = {"Accept": ", ".join(MANIFESTS)} if path.startswith("manifests/") else {}
        if start:
            headers["Range"] = f"bytes={start}-"
        # Tokens last for minutes, some for one blob: each request may ask for a new one once.
        for again in (False, True):
            try:
                return _asked(place, f"{place.path}/{path}", headers)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code == HTTPStatus.UNAUTHORIZED and not again:
                        self._authorize(place, error.headers.get("WWW-Authenticate", ""))
                    # The range begins at the blob's end: it is smaller than the manifest says.
                    elif error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                        raise ImageRefused(f"{path} has {start} bytes, less than its manifest says") from None
                    # 429, as Docker Hub answers to those that pull much.
                    elif error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code == HTTPStatus.TOO_MANY_REQUESTS:
                        raise _Momentary(f"HTTP status {error.code} of {place.host}") from None
                    else:
                        raise ImageRefused(_reason(error)) from None
        raise AssertionError  # the second time raises, whatever the status

    def _authorize(self, place: _Repository, challenge: str) -> None:
        """Get what requests must say, by what the registry asks for."""
        kind, _, rest = challenge.partition(" ")
        try:
            known = login.find(self._auth_file, place.host, place.path)
            if kind.lower() == "basic" and known is not None:
                place.authorization = _basic(known)
            elif kind.lower() == "bearer":
                token = _token(place, dict(_CHALLENGE.findall(rest)), known)
                place.authorization = {"Authorization": f"Bearer {token}"}
        except urllib.error.HTTPError as error:
            with error:
                raise ImageRefused(f"{place.host} gave no access: {_reason(error)}") from None
        except (OSError, ValueError) as error:
            raise ImageRefused(f"{place.host} gave no access: {error}") from None


def _place(host: str, path: str, *, insecure: bool) -> _Repository:
    # TLS first, as Docker does: an insecure registry may have it, with a certificate of its own.
    schemes = ("https", "http") if insecure else ("https",)
    opener = urllib.request.OpenerDirector()
    for handler in _HANDLERS:
        opener.add_handler(handler())
    opener.add_handler(urllib.request.HTTPSHandler(context=_tls(host, insecure=insecure)))
    return _Repository(host, path, opener, [f"{scheme}://{_API_HOSTS.get(host, host)}/v2/" for scheme in schemes])


def _tls(host: str, *, insecure: bool) -> ssl.SSLContext:
    """How a host's certificate is checked, and with which one it is asked."""
    if insecure:  # this host's certificates are not loaded for nothing
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # In this order: verify_mode can't be CERT_NONE while check_hostname is set.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context = ssl.create_default_context()
    for folder in (Path(each, host) for each in _CERTIFICATES):
        for path in sorted(folder.glob("*.crt")):
            context.load_verify_locations(path)
        for path in sorted(folder.glob("*.cert")):
            context.load_cert_chain(path, path.with_suffix(".key"))
    return context


def _asked(place: _Repository, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    for url in place.urls:
        request = urllib.request.Request(url + path, headers=headers)
        for name, value in place.authorization.items():
            request.add_unredirected_header(name, value)  # where it leads to, another one may listen
        try:
            response = place.opener.open(request, timeout=SILENT_S)
        except urllib.error.HTTPError:
            # An answer, be it an error: what listens there speaks this scheme.
            place.urls = [url]
            raise
        # After HTTPError, which is a URLError, too.
        except (urllib.error.URLError, *_BROKE_OFF) as error:
            if url == place.urls[-1]:
                raise _why(place, error) from error
        else:
            place.urls = [url]
            return response
    raise AssertionError  # the last one raises


def _why(place: _Repository, error: Exception) -> Exception:
    """The error's text for a registry that gave no answer. One that can't be reached is refused at once."""
    # urllib wraps what fails while a request is sent, and not what fails while an answer is read.
    reached = not isinstance(error, urllib.error.URLError)
    reason = error if reached else error.reason
    words = str(reason) or type(reason).__name__
    if isinstance(reason, OSError) and reason.strerror and not isinstance(reason, ssl.SSLError):
        words = reason.strerror.lower()
    # A name that doesn't resolve, a refused port or a wrong certificate is a mistake in a setting far more often.
    momentary = reached or isinstance(reason, (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError))
    return (_Momentary if momentary else ImageRefused)(f"{place.host}: {words}")


def _basic(known: login.Login) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'{known.user}:{known.secret}'.encode()).decode()}"}


def _token(place: _Repository, asked: dict[str, str], known: login.Login | None) -> object:
    # The challenge's own scope comes first; some registries name none.
    realm, query = asked.pop("realm", ""), {"scope": f"repository:{place.path}:pull"} | asked
    # An identity token is an OAuth 2 refresh token, which is exchanged by POST (RFC 6749, section 6).
    if known is not None and not known.user:
        form = {"grant_type": "refresh_token", "refresh_token": known.secret, "client_id": "atropos", **query}
        request = urllib.request.Request(realm, data=urllib.parse.urlencode(form).encode())
    else:
        # A realm may have a query of its own.
        joint = "&" if "?" in realm else "?"
        request = urllib.request.Request(f"{realm}{joint}{urllib.parse.urlencode(query)}")
        for name, value in (_basic(known) if known else {}).items():
            request.add_unredirected_header(name, value)
    with place.opener.open(request, timeout=SILENT_S) as response:
        granted = parse(response.read(MAX_JSON_BYTES + 1), "a token")
    # The specification allows both names: `access_token` is OAuth's.
    return granted.get("token") or granted.get("access_token")


def _pause(pauses: Iterator[float], error: Exception) -> None:
    """Wait before the next try; after the last, raise its error as `ImageRefused`."""
    pause_s = next(pauses, None)
    if pause_s is None:
        raise ImageRefused(str(error) or type(error).__name__) from error
    time.sleep(pause_s)


def _reason(error: urllib.error.HTTPError) -> str:
    """What a registry says of an error (OCI distribution specification, error codes)."""
    with contextlib.suppress(ValueError, *_BROKE_OFF):
        # HTTPError is the answer, too: it is read as one.
        body: IO[bytes] = error
        answer = parse(body.read(MAX_JSON_BYTES + 1), "an error")
        words = [str(each.get("message") or each.get("code")) for each in objects(answer, "errors")]
        if words:
            return f"{'; '.join(' '.join(each.split()) for each in words):.500} (HTTP status {error.code})"
    return f"HTTP status {error.code}"
