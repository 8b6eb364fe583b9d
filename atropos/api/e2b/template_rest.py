"""E2B's REST API for templates: built, tagged, looked up and deleted."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from atropos.api.e2b import messages
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.sandbox import iso
from atropos.api.e2b.sandboxes import sandboxes_of
from atropos.api.e2b.templates import LOG_PAGE, Build, Template, Templates
from atropos.api.e2b.uploads import Uploads
from atropos.api.gate import body_of

MAX_BUILD_BYTES = 4 << 20
"""Longest request that starts a build."""
UPLOADS = "/uploads/"
"""Below it are the links that files are sent to, which open themselves: some versions of the SDK send no key there."""
MAX_LINKS = 1000
"""Links to the files of one template."""


@dataclass(frozen=True)
class Link:
    """Where one archive of a build goes."""

    uploads: Uploads
    files_hash: str


class UploadLinks:
    """The upload links of a server, by the secret in each. Of too many to one template's files the oldest goes."""

    def __init__(self) -> None:
        self._all: dict[str, Link] = {}

    def add(self, link: Link) -> str:
        """The link's secret."""
        self._all = {secret: each for secret, each in self._all.items() if not each.uploads.removed}
        same = [secret for secret, each in self._all.items() if each.uploads is link.uploads]
        if len(same) >= MAX_LINKS:
            del self._all[same[0]]
        secret = secrets.token_urlsafe(32)
        self._all[secret] = link
        return secret

    def find(self, path: str) -> Link | None:
        """What a path below the API's own leads to; None: it is no link."""
        return self._all.get(path.removeprefix(UPLOADS)) if path.startswith(UPLOADS) else None


def _templates(request: Request) -> Templates:
    return sandboxes_of(request).templates


def _template(request: Request) -> Template:
    return _templates(request).get(request.path_params["template_id"])


def _build(request: Request) -> Build:
    build = _template(request).builds.get(request.path_params["build_id"])
    if build is None:
        raise RpcError("not_found", f"build {request.path_params['build_id'][:100]!r} was not found")
    return build


async def create(request: Request) -> Response:
    """`POST /v3/templates`."""
    body = messages.parse(messages.NewTemplate, await body_of(request, MAX_BUILD_BYTES))
    build, named = await _templates(request).request(body)
    name = build.template.name
    return JSONResponse(
        {
            "templateID": build.template.id,
            "buildID": build.id,
            "public": False,
            "names": [name],
            "aliases": [name],
            "tags": [*named],
        },
        202,
    )


async def upload_link(request: Request) -> Response:
    """`GET /templates/{id}/files/{hash}`: where an archive of files is sent to, and whether it is there already."""
    files_hash = request.path_params["files_hash"]
    if not messages.FILES_HASH.match(files_hash):
        raise RpcError("invalid_argument", f"{files_hash[:100]!r} is no hash of files")
    uploads = _templates(request).uploads_of(_template(request))
    secret = request.app.state.links.add(Link(uploads, files_hash))
    url, root = request.url, request.scope["root_path"]
    address = f"{url.scheme}://{url.netloc}{root}{UPLOADS}{secret}"
    return JSONResponse({"present": files_hash in uploads, "url": address}, 201)


async def upload(request: Request) -> Response:
    """`PUT` to an upload link."""
    link: Link | None = request.app.state.links.find(request.scope["path"].removeprefix(request.scope["root_path"]))
    if link is None:
        raise RpcError("not_found", "there is no such upload link")
    await link.uploads.receive(link.files_hash, request.stream())
    return Response(status_code=200)


async def start(request: Request) -> Response:
    """`POST /v2/templates/{id}/builds/{id}`."""
    build = _build(request)
    body = messages.parse(messages.StartBuild, await body_of(request, MAX_BUILD_BYTES))
    _templates(request).start(build, body)
    return Response(status_code=202)


async def status(request: Request) -> Response:
    """`GET /templates/{id}/builds/{id}/status`."""

    def number(name: str, default: int) -> int:
        text = request.query_params.get(name, "")
        return int(text) if text.isdecimal() and len(text) < 8 else default

    return JSONResponse(_build(request).info(number("logsOffset", 0), number("limit", LOG_PAGE)))


async def alias(request: Request) -> Response:
    """`GET /templates/aliases/{name}`."""
    return JSONResponse({"templateID": _template(request).id, "public": False})


async def tags(request: Request) -> Response:
    """`GET /templates/{id}/tags`."""
    tagged = _template(request).tags.items()
    return JSONResponse([{"tag": tag, "buildID": build.id, "createdAt": iso(when)} for tag, (build, when) in tagged])


async def assign_tags(request: Request) -> Response:
    """`POST /templates/tags`."""
    body = messages.parse(messages.AssignedTags, await body_of(request, MAX_BUILD_BYTES))
    build = _templates(request).build_of(body.target)
    if build is None:
        raise RpcError("not_found", f"template {body.target[:200]!r} was not found")
    build.template.tag(build, body.tags)
    return JSONResponse({"buildID": build.id, "tags": [*body.tags]}, 201)


async def drop_tags(request: Request) -> Response:
    """`DELETE /templates/tags`."""
    body = messages.parse(messages.DroppedTags, await body_of(request, MAX_BUILD_BYTES))
    template = _templates(request).get(body.name)
    if missing := [tag for tag in body.tags if tag not in template.tags]:
        raise RpcError("not_found", f"template {template.name!r} has no tag {missing[0]!r}")
    for tag in body.tags:
        template.tags.pop(tag, None)
    return Response(status_code=204)


async def list_all(request: Request) -> Response:
    """`GET /templates`."""
    return JSONResponse([_info(template) for template in _templates(request).all()])


def _info(template: Template) -> Json:
    build = next(reversed(template.builds.values()), None)
    return {
        "templateID": template.id,
        "buildID": "" if build is None else build.id,
        "buildStatus": "waiting" if build is None else build.status,
        "buildCount": len(template.builds),
        "names": [template.name],
        "aliases": [template.name],
        "public": False,
    }
