"""In place of ``sglrollout.engine.server_main``, and up at once: ``python -m tests.fake_server FD PARENT_PID SCRATCH``.

The argument ``served_model_name`` says how it behaves:

- ``obeys``: is up, and ends on SIGINT;
- ``stubborn``: is up, and ignores SIGINT;
- ``dies``: is up, and ends with an exception when it is asked for ``/die``;
- ``fails``: ends with an exception before it is up;
- ``loads``: never comes up, and answers ``/health`` with 200, as another server at the port would.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            sys.stderr.write("[2026-01-01 TP0] torch.OutOfMemoryError: no memory\n")
            sys.stderr.flush()
            os._exit(9)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def main() -> None:
    arguments = json.loads(Path(f"/proc/self/fd/{sys.argv[1]}").read_bytes())
    behaviour = arguments["served_model_name"]
    if behaviour == "fails":
        raise ValueError("no such model")
    stop = signal.SIG_IGN if behaviour == "stubborn" else lambda *args: os._exit(0)
    signal.signal(signal.SIGINT, stop)
    server = HTTPServer((arguments["host"], arguments["port"]), Handler)
    sys.stderr.write("[2026-01-01 00:00:00 TP0] Load weight begin.\n")
    sys.stderr.flush()
    if arguments.get("ssl_certfile"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(arguments["ssl_certfile"], arguments["ssl_keyfile"])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    if behaviour != "loads":
        Path(sys.argv[3], "ready").touch()
    server.serve_forever()


if __name__ == "__main__":
    main()
