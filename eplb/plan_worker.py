"""The planner's process: plans come in on standard input, answers go out on standard output. Imports no jax.

`python -m widemesh.eplb.plan_worker`; `planner.py` starts it. It ends when its input is closed, also in the middle of a
plan, so it never outlives the engine.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from typing import IO

from widemesh.eplb.plan import make_plan
from widemesh.eplb.plan_messages import decode_question, encode_failure, encode_plan, read_message, write_message

_NICENESS = 10  # the engine's threads come first


def main() -> None:
    """Answer questions until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up among the answers
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_take_in, args=(sys.stdin.buffer, questions), daemon=True).start()
    while True:
        write_message(answers, _answer(questions.get()))


def _take_in(stream: IO[bytes], questions: queue.SimpleQueue[bytes]) -> None:
    while (content := read_message(stream)) is not None:
        questions.put(content)
    os._exit(0)  # whatever the plan under way is worth, there is nobody to take it


def _answer(question: bytes) -> bytes:
    try:
        return encode_plan(make_plan(*decode_question(question)))
    except Exception as err:
        return encode_failure(f"{type(err).__name__}: {err}")


if __name__ == "__main__":
    main()
