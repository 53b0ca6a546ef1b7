"""Looks at each page of the built site in Chromium: `python -m docs.site.check`, or `make docs-check`.

Each page is opened light and dark, 400 and 1280 pixels wide. A fault is an error in the console, a page that scrolls sideways, and text
whose contrast is below WCAG's AA. Links between pages are checked by the build; links within a page are checked here.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from websocket import WebSocket, create_connection

from docs.site.build import OUT

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (400, 1280)
THEMES = ("light", "dark")
PAGES = ("docs/**/*.html", "notebooks/*.html", "benchmarks/*.html", "[A-Z]*.html", "genindex.html", "search.html")
"""What is looked at, by patterns below the site; `index.html` only leads on."""
_SCRIPT = Path(__file__).with_name("page_faults.js")
_PATIENCE_S = 60


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site, and logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


class Tab:
    """A tab of the browser, by the DevTools protocol."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket, self._number = socket, 0
        self.errors: list[str] = []
        self._has_loaded = False
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result; events that come before it are noted."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = self._next()
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result

    def open(self, address: str) -> None:
        """Opens a page, and waits until it has loaded."""
        self.errors, self._has_loaded = [], False
        self.ask("Page.navigate", url=address)
        end = time.monotonic() + _PATIENCE_S
        while not self._has_loaded and time.monotonic() < end:
            self._next()

    def value(self, expression: str) -> Any:
        """Returns what an expression gives in the page, promises awaited."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv())
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._has_loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))
        return message


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """Serves a folder on this machine alone, and gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


@contextmanager
def _browser(command: str) -> Iterator[Tab]:
    """Starts a browser without a window, and gives its tab."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        process = subprocess.Popen(
            [command, *options, "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = _port(Path(profile) / "DevToolsActivePort")
            yield Tab(create_connection(_tab_address(port), timeout=_PATIENCE_S, suppress_origin=True))
        finally:
            process.terminate()
            process.wait(timeout=_PATIENCE_S)


def _port(file: Path) -> int:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        if file.exists() and len(lines := file.read_text().splitlines()) > 1:
            return int(lines[0])
        time.sleep(0.1)
    raise RuntimeError("The browser did not start.")


def _tab_address(port: int) -> str:
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/json") as answer:
        tabs = json.load(answer)
    address: str = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
    return address


def faults_of(tab: Tab, address: str) -> Iterator[str]:
    """Yields what is wrong with a page, in each theme and width."""
    for theme in THEMES:
        tab.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        for width in WIDTHS:
            tab.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            if width == WIDTHS[0]:
                tab.open(address)
                yield from (f"{theme}: console: {error}" for error in tab.errors)
            yield from (f"{theme}, {width} px: {fault}" for fault in tab.value(_SCRIPT.read_text()))


def main(patterns: list[str]) -> int:
    """Checks the pages whose path below the site matches one of `patterns`, or all; returns 1 if there are faults."""
    command = next(filter(None, map(shutil.which, BROWSERS)), None)
    if command is None:
        print(f"No browser was found: install one of {', '.join(BROWSERS)}.", file=sys.stderr)
        return 2
    site = OUT / "html"
    pages = sorted({page for pattern in patterns or PAGES for page in site.glob(pattern)})
    count = 0
    with _served(site) as root, _browser(command) as tab:
        for page in pages:
            path = page.relative_to(site).as_posix()
            for fault in faults_of(tab, f"{root}/{path}"):
                count += 1
                print(f"{path}: {fault}")
    print(f"{len(pages)} pages in {len(THEMES)} themes and {len(WIDTHS)} widths: {count} faults.")
    return 1 if count or not pages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
