"""
A server of the OpenAI kind without a model: `openai_server.py FOLDER PORT`.

A token is a character, and one before them. The prompt says what the server does.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FOLDER, PORT = sys.argv[1], int(sys.argv[2])


class Handler(BaseHTTPRequestHandler):
    """Completions by the first word of the prompt."""

    def do_GET(self):
        """Say that the server is up."""
        self._say(200, {})

    def do_POST(self):
        """Complete a prompt."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        word = asked["prompt"].partition(" ")[0]
        if word == "die":
            print("out of memory", flush=True)
            os._exit(7)
        if word == "refuse":
            return self._say(400, {"detail": "no such model"})
        text = {
            "seed": str(asked["seed"]), "heat": str(asked["temperature"]), "folder": FOLDER[-1], "silent": "",
        }.get(word, asked["prompt"][::-1])[: asked["max_tokens"]]  # fmt: skip
        num = min(asked["max_tokens"], len(text) + 1 + (word == "lost"))
        choice = {"text": text, "finish_reason": "length" if num == asked["max_tokens"] else "stop"}
        if word == "logs":
            choice["logprobs"] = {"token_logprobs": [-0.5 * place for place in range(num)]}
        usage = {"prompt_tokens": 1 + len(asked["prompt"]) + (word == "split"), "completion_tokens": num}
        found = {"model": "other" if word == "stranger" else f"{asked['model']}@main", "choices": [choice]}
        return self._say(200, {"choices": []} if word == "junk" else {**found, "usage": usage})

    def log_message(self, *_):
        """Print nothing."""

    def _say(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class Server(ThreadingHTTPServer):
    """Lets as many clients wait as ask at a time."""

    request_queue_size = 64


if __name__ == "__main__":
    Server(("127.0.0.1", PORT), Handler).serve_forever()
