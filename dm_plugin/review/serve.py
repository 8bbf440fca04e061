"""`dm-plugin watch RUN`: the report page over HTTP on the loopback interface, built again when dumps land.

    GET /           the page, with a few lines that ask for the state every `every` seconds and reload when it changed
    GET /state      {"files": n, "newest": name}: cheap, from the folder listing alone
Nothing leaves the machine: the server binds 127.0.0.1, answers two paths, and reads the run folder only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dm_plugin.dump import DumpError

SCRIPT = """<script>
(function () {
  var seen = null;
  function look() {
    fetch('/state').then(function (r) { return r.json(); }).then(function (s) {
      var now = JSON.stringify(s);
      if (seen !== null && seen !== now) { location.reload(); }
      seen = now;
    }).catch(function () {});
  }
  look();
  setInterval(look, %d);
})();
</script>
"""


def state(run: Path) -> dict[str, object]:
    """What the folder holds, without opening a file."""
    names = sorted(str(p.relative_to(run)) for p in run.rglob("rank_*.safetensors") if "captures" not in p.parts)
    curves = sorted((str(p.relative_to(run)), p.stat().st_size) for p in run.rglob("train.jsonl"))
    return {"files": len(names), "newest": names[-1] if names else None, "curves": curves}


def server(run: Path, build: Callable[[], str], port: int = 0, every: float = 5.0) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 (port 0: any free one); serve_forever() runs it. build() makes the page; it may raise DumpError."""
    cache: dict[str, str] = {}
    lock = threading.Lock()

    def page() -> str:
        with lock:
            now = json.dumps(state(run))
            if now not in cache:
                try:
                    text = build()
                except DumpError as error:
                    text = f"<!doctype html><title>dm-plugin watch</title><body><p>No dumps yet: {_plain(str(error))}</p></body>"
                cache.clear()
                text = text.replace(
                    "default-src 'none'", "default-src 'none'; connect-src 'self'"
                )  # the state, nothing else
                cache[now] = text.replace("</body>", SCRIPT % int(1000 * every) + "</body>")
            return cache[now]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/state":
                self._answer(200, "application/json", json.dumps(state(run)))
            elif self.path == "/":
                self._answer(200, "text/html; charset=utf-8", page())
            else:
                self._answer(404, "text/plain", "not here: / and /state\n")

        def _answer(self, code: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def _plain(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
