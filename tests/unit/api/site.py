"""A small site on loopback: pages, forms, logins, files, and things that go wrong."""

from __future__ import annotations

import asyncio
import gzip
import html
import json
import zlib
from collections.abc import Callable
from typing import Any

import zstandard
from aiohttp import web

ARTICLE = """<!doctype html><html><head><title>On Slots</title></head><body>
<nav><a href="/">Home</a> <a href="/ads">Buy things</a></nav>
<article><h1>On Slots</h1>
<p>A slot is leased, used, reset and leased again. It never remembers what happened in it, which is the point of it.</p>
<p>Volumes are dropped whole. Nothing is wiped, because nothing is left that could be wiped by anyone at all.</p>
<ul><li>first point</li><li>second point</li></ul></article>
<footer>Copyright nobody</footer></body></html>"""

HOME = """<!doctype html><html><head><title>Home</title></head><body><h1>Welcome</h1>
<a href="/article">Read the article</a> <a href="/form">The form</a> <a href="/login">Log in</a>
<a href="/file.bin">Download a file</a> <a href="/popup" target="_blank">New window</a>
<button onclick="alert('boo')">Alert</button><button onclick="document.title='clicked'">Rename</button>
</body></html>"""

FORM = """<!doctype html><title>Form</title><form action="/submitted" method="post">
<label>Name <input name="name"></label><label>Colour <select name="colour"><option>red</option><option>blue</option>
</select></label><button>Send</button></form>"""


ATTACK = """<!doctype html><html><head><title>Attack</title>
<link rel="preconnect" href="http://TARGET"><link rel="dns-prefetch" href="http://TARGET">
<link rel="prefetch" href="http://TARGET/prefetch"><link rel="stylesheet" href="http://TARGET/css">
<link rel="manifest" href="http://TARGET/manifest"><link rel="icon" href="http://TARGET/icon">
<link rel="modulepreload" href="http://TARGET/module"><script src="http://TARGET/script"></script>
<script type="speculationrules">{"prefetch": [{"source": "list", "urls": ["http://TARGET/speculated"],
"eagerness": "immediate"}], "prerender": [{"source": "list", "urls": ["/redirect?to=http://TARGET/p"],
"eagerness": "immediate"}]}</script>
<style>@import url(http://TARGET/import); body { background: url(http://TARGET/background) }
@font-face { font-family: f; src: url(http://TARGET/font) } p { font-family: f }</style></head><body><p>text</p>
<img src="http://TARGET/img"><video src="http://TARGET/video"></video><object data="http://TARGET/object"></object>
<embed src="http://TARGET/embed"><iframe src="http://TARGET/iframe"></iframe><iframe src="file:///etc/hostname"></iframe>
<iframe src="data:text/html,<script>fetch('http://TARGET/data', {mode: 'no-cors'})</script>"></iframe>
<iframe srcdoc="<script>fetch('http://TARGET/srcdoc', {mode: 'no-cors'})</script>"></iframe>
<form id=f action="http://TARGET/form" method=post target=hidden><input name=a value=b></form><iframe name=hidden></iframe>
<h1 id=out>trying</h1><script>
const told = [];
const tries = {
  fetch: () => fetch('http://TARGET/fetch', {mode: 'no-cors'}),
  post: () => fetch('http://TARGET/post', {method: 'POST', mode: 'no-cors', body: 'x', keepalive: true}),
  redirect: () => fetch('/redirect?to=http://TARGET/redirected', {mode: 'no-cors'}),
  file: () => fetch('file:///etc/hostname'),
  xhr: () => new Promise((yes, no) => { const x = new XMLHttpRequest(); x.onload = yes; x.onerror = no;
    x.open('GET', 'http://TARGET/xhr'); x.send(); }),
  socket: () => new Promise((yes, no) => { const s = new WebSocket('ws://TARGET/socket'); s.onopen = yes; s.onerror = no; }),
  events: () => new Promise((yes, no) => { const e = new EventSource('http://TARGET/events'); e.onopen = yes; e.onerror = no; }),
  beacon: () => { navigator.sendBeacon('http://TARGET/beacon', 'x'); return Promise.reject(); },
  module: () => import('http://TARGET/dynamic'),
  worker: () => { new Worker('/worker.js?target=TARGET'); return Promise.reject(); },
  blob: () => { new Worker(URL.createObjectURL(new Blob(["fetch('http://TARGET/blob', {mode: 'no-cors'})"])));
    return Promise.reject(); },
  service: () => navigator.serviceWorker.register('/worker.js?target=TARGET').then(r => new Promise((yes, no) =>
    setTimeout(() => r && r.active ? yes() : no(), 300))),
  rtc: async () => { const c = new RTCPeerConnection({iceServers: [{urls: 'stun:TARGET'}, {urls: 'turn:TARGET?transport=tcp',
    username: 'u', credential: 'c'}]}); c.createDataChannel('d'); await c.setLocalDescription(await c.createOffer());
    await new Promise(yes => setTimeout(yes, 300)); throw 0; },
  transport: () => new WebTransport('https://TARGET/transport').ready,
  form: () => { document.getElementById('f').submit(); return Promise.reject(); },
  open: () => { window.open('http://TARGET/open'); return Promise.reject(); },
};
Promise.all(Object.entries(tries).map(([name, go]) => Promise.race([
  Promise.resolve().then(go).then(() => told.push(name), () => 0), new Promise(yes => setTimeout(yes, 1500))])))
  .then(() => { document.getElementById('out').textContent = 'over, reached: [' + told.join(' ') + ']'; });
</script></body></html>"""


GO = {
    "meta": '<title>Go</title><meta http-equiv="refresh" content="0;url=TO">',
    "script": '<title>Go</title><a id=a href="TO"></a><script>location = document.getElementById("a").href</script>',
    "click": '<title>Go</title><a id=a href="TO" target=_blank></a><script>document.getElementById("a").click()</script>',
    "frame": '<title>Go</title><iframe src="TO"></iframe>',
    "form": '<title>Go</title><form id=f action="TO"></form><script>document.getElementById("f").submit()</script>',
    "header": "<title>Go</title>",
}

INSIST = """<!doctype html><title>Insist</title><link rel=dns-prefetch href="//prefetched.test"><h1 id=out>trying</h1><script>
(async () => { const told = [];
  for (let i = 0; i < 24; i++) { try { told.push((await fetch('/article?' + i, {cache: 'no-store'})).status); } catch (e) { told.push(0); } }
  document.getElementById('out').textContent = 'over: ' + told.join(' '); })();
</script>"""


PACKED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "twice": ("gzip, gzip", lambda: gzip.compress(gzip.compress(bytes(50_000_000)))),
    "zstd": ("zstd", lambda: zstandard.compress(bytes(50_000_000))),
    "unknown": ("br", lambda: b"x" * 100),
    "broken": ("gzip", lambda: b"no gzip at all"),
    "members": ("gzip", lambda: gzip.compress(b"one ") + gzip.compress(b"two") + bytes(10)),
    "zlib": ("deflate", lambda: zlib.compress(b"one two")),
    "plain": ("identity", lambda: b"one two"),
}


def pdf(text: str) -> bytes:
    """A one-page PDF."""
    stream = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%b\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body = b"%PDF-1.4\n"
    places = []
    for number, content in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return body + b"xref\n0 6\n0000000000 65535 f \n%btrailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (
        table,
        len(body),
    )


def _html(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/html")


class Site:
    """The running site; `seen` are the paths that were asked for. With `hangs_up`, one answer a connection."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, hangs_up: bool = False) -> None:
        self.seen: list[str] = []
        self.hangs_up = hangs_up
        self.visitors = 0
        self.host, self.port = host, port
        self._runner: web.AppRunner | None = None

    def url(self, path: str) -> str:
        return f"http://{self.host}:{self.port}{path}"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._note])
        app.add_routes(
            [
                web.get("/", self._static(HOME)),
                web.get("/article", self._static(ARTICLE)),
                web.get("/form", self._static(FORM)),
                web.get("/popup", self._static("<title>Popup</title><h1>A new window</h1>")),
                web.post("/submitted", self._submitted),
                web.get("/login", self._login),
                web.get("/who", self._who),
                web.get("/visit", self._visit),
                web.get("/redirect", self._redirect),
                web.get("/loop", self._loop),
                web.get("/choices", self._choices),
                web.get("/file.bin", self._file),
                web.get("/paper.pdf", self._pdf),
                web.get("/data.json", self._json),
                web.get("/endless", self._endless),
                web.get("/bomb", self._bomb),
                web.get("/packed", self._packed),
                web.get("/drip", self._drip),
                web.get("/broken", self._broken),
                web.get("/hang", self._hang),
                web.get("/reach", self._reach),
                web.get("/attack", self._attack),
                web.get("/go", self._go),
                web.get("/insist", self._static(INSIST)),
                web.get(
                    "/spin",
                    self._static(
                        "<title>Spin</title><h1>begun</h1><script>setTimeout(() => { for (;;); }, 300)</script>"
                    ),
                ),
                web.get("/worker.js", self._worker),
                web.get("/search", self._search),
                web.get("/res/v1/web/search", self._brave),
                web.post("/search", self._tavily),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        listening = web.TCPSite(self._runner, self.host, self.port)
        await listening.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.seen.append(request.path)
        response: web.StreamResponse = await handler(request)
        if self.hangs_up:
            response.force_close()
        return response

    def _static(self, text: str) -> Any:
        async def answer(_: web.Request) -> web.Response:
            return _html(text)

        return answer

    async def _submitted(self, request: web.Request) -> web.Response:
        form = await request.post()
        return _html(f"<title>Thanks</title><h1>Hello {form['name']}</h1><p>You like {form['colour']}</p>")

    async def _login(self, request: web.Request) -> web.Response:
        answer = _html("<title>In</title><h1>Logged in</h1><a href='/who'>Who am I</a>")
        answer.set_cookie("user", "ada")
        return answer

    async def _who(self, request: web.Request) -> web.Response:
        return _html(f"<title>Who</title><h1>You are {request.cookies.get('user', 'nobody')}</h1>")

    async def _visit(self, request: web.Request) -> web.Response:
        """The visitor's number, which a cookie tells: without one, a new visitor is sent here again with it."""
        if "visit" in request.cookies:
            return web.Response(text=request.cookies["visit"])
        self.visitors += 1
        answer = web.Response(status=302, headers={"Location": "/visit"})
        answer.set_cookie("visit", str(self.visitors))
        return answer

    async def _redirect(self, request: web.Request) -> web.Response:
        raise web.HTTPFound(request.query["to"])

    async def _loop(self, request: web.Request) -> web.Response:
        raise web.HTTPFound("/loop")

    async def _choices(self, _: web.Request) -> web.Response:
        return web.Response(status=300, text="one of several")

    async def _file(self, _: web.Request) -> web.Response:
        headers = {"Content-Disposition": "attachment; filename=file.bin"}
        return web.Response(body=b"\0" * 1000, content_type="application/octet-stream", headers=headers)

    async def _pdf(self, _: web.Request) -> web.Response:
        return web.Response(body=pdf("Slots in a PDF"), content_type="application/pdf")

    async def _json(self, _: web.Request) -> web.Response:
        return web.json_response({"answer": 42})

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await answer.prepare(request)
        while True:
            await answer.write(b"x" * 65_536)

    async def _bomb(self, _: web.Request) -> web.Response:
        return web.Response(
            body=gzip.compress(b"0" * 50_000_000), headers={"Content-Encoding": "gzip", "Content-Type": "text/plain"}
        )

    async def _packed(self, request: web.Request) -> web.Response:
        encoding, body = PACKED[request.query["how"]]
        return web.Response(body=body(), headers={"Content-Encoding": encoding, "Content-Type": "text/plain"})

    async def _drip(self, request: web.Request) -> web.StreamResponse:
        """A byte now and then, for ever."""
        answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await answer.prepare(request)
        while True:
            await answer.write(b"x")
            await asyncio.sleep(0.05)

    async def _broken(self, _: web.Request) -> web.Response:
        return web.Response(status=500, text="broken")

    async def _hang(self, _: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        return web.Response()

    async def _reach(self, request: web.Request) -> web.Response:
        """A page whose script tries to reach another address, and says what came of it."""
        target = json.dumps(request.query["target"])
        return _html(
            f"<title>Reach</title><h1 id=r>trying</h1><script>fetch({target}, {{mode: 'no-cors'}})"
            ".then(() => document.getElementById('r').textContent = 'reached')"
            ".catch(() => document.getElementById('r').textContent = 'not reached')</script>"
            f"<img src={target}>"
        )

    async def _attack(self, request: web.Request) -> web.Response:
        """A page that tries every way there is to reach `host:port`, and a file of the browser's machine."""
        return _html(ATTACK.replace("TARGET", request.query["target"]))

    async def _go(self, request: web.Request) -> web.Response:
        """A page that leads its window to another address."""
        to = request.query["to"]
        answer = _html(GO[request.query["how"]].replace("TO", html.escape(to)))
        if request.query["how"] == "header":
            answer.headers["Refresh"] = f"0;url={to}"
        return answer

    async def _worker(self, request: web.Request) -> web.Response:
        text = f"fetch('http://{request.query['target']}/worker', {{mode: 'no-cors'}}).catch(() => 0)"
        return web.Response(text=text, content_type="text/javascript")

    async def _search(self, request: web.Request) -> web.Response:
        if request.query.get("q") == "fail":
            return web.Response(status=500)
        if request.query.get("q") == "nonsense":
            return web.Response(text="<html>")
        hits = [{"title": f"Hit {i}", "url": f"https://example.org/{i}", "content": "about it"} for i in range(9)]
        hits.append({"title": "bad", "url": "javascript:alert(1)"})
        return web.json_response({"results": hits})

    async def _brave(self, request: web.Request) -> web.Response:
        if request.headers.get("X-Subscription-Token") != "brave-key":
            return web.Response(status=401)
        query = request.query["q"]
        if not query.strip() or len(query) > 400 or len(query.split()) > 50:  # as Brave documents it
            return web.Response(status=422)
        return web.json_response(
            {"web": {"results": [{"title": "B", "url": "https://b.example/", "description": "d"}]}}
        )

    async def _tavily(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer tavily-key":
            return web.Response(status=401)
        body = await request.json()
        hits = [{"title": "T", "url": "https://t.example/", "content": body["query"]}]
        return web.json_response({"results": hits})
