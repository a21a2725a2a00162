"""The server of `twophase ui`: pages for this machine's own browser alone.

It listens on 127.0.0.1 and answers only requests that name it as their host. A foreign page whose name resolves to this
machine (DNS rebinding) gets nothing. It writes nothing.
"""

from __future__ import annotations

import os
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, unquote_to_bytes, urlsplit

import twophase.studies.policies  # noqa: F401 - the runs of a study may name policies of it
from twophase.base.config import UsageError
from twophase.report.page import page, tag
from twophase.report.ui import VIEW, Library
from twophase.runs.folder import REPORT

HOST = "127.0.0.1"
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def serve(library: Library, port: int) -> ThreadingHTTPServer:
    """Return a server of a library's pages that listens already.

    Raises:
        UsageError: the port is in use, or may not be taken.
    """
    handler = type("Handler", (_Handler,), {"library": library})
    try:
        return _Server((HOST, port), handler)
    except OSError as error:
        raise UsageError(f"--port {port}: cannot be used ({error.strerror}); choose another, or 0") from None


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error, unless the client disconnected."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    library: Library
    protocol_version = "HTTP/1.1"
    timeout = 60  # a browser that keeps a connection open must not keep a thread for ever

    def do_GET(self) -> None:
        """Answer with the list, the page of a folder, or that of several runs."""
        server: ThreadingHTTPServer = self.server  # type: ignore[assignment] - the one that `serve` makes
        if self.headers.get("Host") not in {f"{name}:{server.server_port}" for name in (HOST, "localhost")}:
            self._answer(HTTPStatus.FORBIDDEN, _message("This server answers this machine's own browser alone."))
            return
        address = urlsplit(self.path)
        if address.path == "/favicon.ico":  # browsers ask for it; pages have none
            self._answer(HTTPStatus.NO_CONTENT, "")
            return
        try:
            self._answer(HTTPStatus.OK, self._page(address.path, parse_qs(address.query).get("run", [])))
        except UsageError as error:
            self._answer(HTTPStatus.NOT_FOUND, _message(str(error)))
        except OSError as error:  # a file that went while it was read
            self._answer(HTTPStatus.NOT_FOUND, _message(f"cannot be read: {error.strerror or error}"))

    def _page(self, path: str, runs: list[str]) -> str:
        if path == "/":
            return self.library.list_page()
        if not path.startswith(VIEW):
            raise UsageError(f"{unquote(path)}: there is no such page; the list is at /")
        runs = [os.fsdecode(unquote_to_bytes(run)) for run in runs]
        if runs or not path.removeprefix(VIEW):
            return self.library.overlay_page(runs) if runs else self.library.folder_page([])
        parts = [os.fsdecode(unquote_to_bytes(part)) for part in path.removeprefix(VIEW).rstrip("/").split("/")]
        # A sweep's page leads to the pages that `report` would have written next to the runs.
        return self.library.folder_page(parts[:-1] if parts[-1] == REPORT else parts)

    def _answer(self, status: HTTPStatus, text: str) -> None:
        # The links of a folder's page are relative to the folder, so its address must end with a slash.
        path = urlsplit(self.path).path
        if status == HTTPStatus.OK and path.startswith(VIEW) and not path.endswith(("/", REPORT)):
            self.send_response(HTTPStatus.MOVED_PERMANENTLY)
            self.send_header("Location", f"{path}/")
            text = ""
        else:
            self.send_response(status)
        content = text.encode()
        for name, value in (_HEADERS | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that the base class has
        """Print nothing: a line a request would bury the address."""


def _message(text: str) -> str:
    return page("twophase ui", text, tag("p", tag("a", "All runs and sweeps", href="/")))
