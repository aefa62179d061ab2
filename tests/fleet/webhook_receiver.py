"""A receiver of webhooks as a process of its own: it answers as it is told, and writes down what it got.

python -m tests.fleet.webhook_receiver PORT FILE [STATUS ...]

One status for each message, the last one for all others. Each line of the file is {"headers", "body", "status"}.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    port, path, *statuses = sys.argv[1:]
    answers = [int(status) for status in statuses] or [204]
    told = Path(path)

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = answers.pop(0) if len(answers) > 1 else answers[0]
            line = {"headers": dict(self.headers), "path": self.path, "body": body.decode(), "status": status}
            with told.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", int(port)), Receiver).serve_forever()


if __name__ == "__main__":
    main()
