"""One log line per request: what it was and what became of it, without a word of its text."""

from __future__ import annotations

import logging
import time

from widemesh.serving.request import Delta

logger = logging.getLogger("widemesh.requests")


class RequestLog:
    """Collects the figures of one request while it is served; `write` logs them once."""

    def __init__(self, request_id: str):
        self.request_id = request_id
        self.finish = "error"  # a finish reason, "cancelled" (the client went away), or "refused:STATUS"
        self.prompt_tokens = self.cached_tokens = 0
        self._completion_tokens: dict[int, int] = {}  # by sample
        self._start_s = time.monotonic()
        self._accept_s: float | None = None
        self._first_token_s: float | None = None

    @property
    def completion_tokens(self) -> int:
        """Of all samples."""
        return sum(self._completion_tokens.values())

    def accepted(self) -> None:
        """The prompt is encoded and the engine has taken it."""
        self._accept_s = time.monotonic()

    def add(self, delta: Delta) -> None:
        """Take the figures of one delta."""
        if self._first_token_s is None and len(delta.token_ids):
            self._first_token_s = time.monotonic()
        self.request_id = delta.request_id or self.request_id
        self.prompt_tokens = delta.prompt_tokens
        self._completion_tokens[delta.index] = delta.completion_tokens
        self.cached_tokens = delta.cached_tokens
        if delta.finish_reason is not None:
            self.finish = str(delta.finish_reason)

    def write(self) -> None:
        """Log the line. Times are milliseconds since the request arrived; `-` where it never came so far."""
        logger.info(
            "request id=%r prompt_tokens=%d completion_tokens=%d cached_tokens=%d accept_ms=%s ttft_ms=%s total_ms=%s "
            "finish=%s",
            self.request_id[:128],
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            self._since_start_ms(self._accept_s),
            self._since_start_ms(self._first_token_s),
            self._since_start_ms(time.monotonic()),
            self.finish,
        )

    def _since_start_ms(self, moment_s: float | None) -> str:
        return "-" if moment_s is None else f"{1000 * (moment_s - self._start_s):.1f}"
