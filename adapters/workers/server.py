"""
Engine behind an OpenAI-compatible server, which is started again for each version of the weights.

The server gives text. Its encoding has other tokens than were drawn where special tokens are left
out of the text, where bytes are no UTF-8, or where the encoder splits the text in another way. The
number of drawn tokens, which the server reports, shows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib import request
from urllib.error import HTTPError

import numpy as np

from packplan.adapters.lifeline import end_with_parent
from packplan.core.errors import ConfigError
from packplan.core.ports import RankGroup
from packplan.core.rl import Completion

KEY = "grpo.engine_command"

START_S = 1800.0
"""Seconds until a server answers: it loads a model, and may compile it."""

ANSWER_S = 1800.0
"""Seconds for an answer, which may wait for others."""

_REQUESTS = 16
"""Requests of a worker at a time."""

_HTTP = request.build_opener(request.ProxyHandler({}))
"""The server is on this machine, behind no proxy."""


class ServerEngine:
    """A `core.ports.Engine`: the first worker starts its server, and all workers ask it."""

    def __init__(self, command: str, *, tokenizer: Any, group: RankGroup) -> None:
        """
        Prepare an engine; `update` starts it.

        Args:
            command: Command of a server that serves `{folder}` on `{port}` of this machine.
            tokenizer: Tokenizer of the policy, which the server has too.
            group: The workers, as ranks; all on this machine.
        """
        self._command, self._tokenizer, self._group = command, tokenizer, group
        self._process: subprocess.Popen[bytes] | None = None
        self._address, self._folder, self._version = "", "", 0

    def update(self, version: int, folder: str, /) -> None:
        """Start the server on other weights, on the first worker; see `core.ports.Engine`."""
        self._version, self._folder = version, folder
        started: Mapping[str, str] = self._start() if self._group.rank == 0 else {}
        started = json.loads(self._group.gather(json.dumps(started), timeout_s=2 * START_S)[0])
        if "failed" in started:
            raise ConfigError.at(KEY, started["failed"])
        self._address = started["address"]

    def complete(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int], /, *, temperature: float, max_new_tokens: int
    ) -> list[Completion]:
        """
        Answer prompts by requests, several at a time; see `core.ports.Engine`.

        Args:
            prompts: Token ids of each prompt.
            keys: A number for each answer, whose high bits are the request's seed.
            temperature: Temperature of sampling; 0 takes the most likely token.
            max_new_tokens: Most tokens of an answer.
        """
        # Tokenizers are not safe in threads, and answers to one prompt share its text.
        texts = {prompt: self._text(prompt) for prompt in dict.fromkeys(map(tuple, prompts))}

        def ask(prompt: Sequence[int], key: int) -> dict[str, Any]:
            return self._post({
                "model": self._folder, "prompt": texts[tuple(prompt)], "max_tokens": max_new_tokens,
                "temperature": temperature, "top_p": 1.0, "seed": key >> 33, "logprobs": 0,
            })  # fmt: skip

        with ThreadPoolExecutor(_REQUESTS) as threads:
            found = list(threads.map(ask, prompts, keys))
        return [
            self._completion(one, num_prompt=len(prompt), max_new_tokens=max_new_tokens)
            for one, prompt in zip(found, prompts, strict=True)
        ]

    def close(self) -> None:
        """End the server, with the processes that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _start(self) -> Mapping[str, str]:
        """Start the server on the weights; return its address, or why it failed."""
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            word.replace("{folder}", self._folder).replace("{port}", str(port)) for word in shlex.split(self._command)
        ]
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    preexec_fn=end_with_parent,  # noqa: PLW1509  # one call to the kernel
                )  # fmt: skip
        except OSError as error:
            return {"failed": f"cannot be started: {error}"}
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while time.monotonic() < deadline:
            if ended := self._ended():
                return {"failed": ended}
            with contextlib.suppress(OSError, HTTPException), _HTTP.open(f"{address}/health", timeout=5):
                return {"address": address}
            time.sleep(0.05)
        return {"failed": f"does not answer on /health within {START_S:,.0f} s: {self._last_words()}"}

    def _post(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's answer to a request for a completion."""
        url, headers = f"{self._address}/v1/completions", {"Content-Type": "application/json"}
        body = request.Request(url, json.dumps(asked).encode(), headers)  # noqa: S310  # http alone, see `_start`
        try:
            with _HTTP.open(body, timeout=ANSWER_S) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except HTTPError as error:
            reason = f"answers with status {error.code}: {error.read(400).decode(errors='replace')}"
        except (OSError, HTTPException, ValueError) as error:
            # Its connections end before it does.
            reason = self._ended(within_s=2.0) or f"does not answer on {self._address}: {type(error).__name__}: {error}"
        raise ConfigError.at(KEY, reason)

    def _completion(self, found: Mapping[str, Any], *, num_prompt: int, max_new_tokens: int) -> Completion:
        """Return an answer of the server as tokens."""
        try:
            (choice,), usage, model = found["choices"], found["usage"], found["model"]
            read, num, text, end = (
                usage["prompt_tokens"],
                usage["completion_tokens"],
                choice["text"],
                choice["finish_reason"],
            )
            logs = (choice.get("logprobs") or {}).get("token_logprobs")
        except (KeyError, ValueError, TypeError, AttributeError):
            raise ConfigError.at(KEY, f"gives no completion, but {json.dumps(found):.200}") from None
        if self._folder not in model:
            raise ConfigError.at(KEY, f"answers with the model {model}, not with {self._folder}")
        if read != num_prompt:
            raise ConfigError.at(KEY, f"reads {read} tokens in a prompt of {num_prompt}: it has another tokenizer")
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        # The text lacks the token that ends it.
        if end == "stop":
            tokens = [*tokens, self._tokenizer.eos_token_id]
        is_exact = len(tokens) == num
        return Completion(
            # An answer of special tokens alone has no text.
            np.array(tokens[:max_new_tokens] or [self._tokenizer.eos_token_id]),
            np.array(logs, dtype=np.float32) if is_exact and logs and len(logs) == num else None,
            self._version,
            is_exact,
        )

    def _text(self, prompt: Sequence[int]) -> str:
        """Return the text that the server reads as a prompt's tokens; ConfigError if none is."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # Some tokenizers begin every text with a token of their own.
        for candidate in (text, text.removeprefix(self._tokenizer.bos_token or "")):
            if self._tokenizer(candidate)["input_ids"] == list(prompt):
                return str(candidate)
        raise ConfigError.at(KEY, f"reads text, and no text has the tokens of the prompt {text!r:.100}")

    @property
    def _log(self) -> Path:
        return Path(self._folder) / "engine.log"

    def _ended(self, *, within_s: float = 0.0) -> str:
        """Return how the server ended; empty while it runs, or where another worker started it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                return f"ended with status {self._process.wait(within_s)}: {self._last_words()}"
        return ""

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1][-200:]} ({self._log})" if lines else "it printed nothing"
