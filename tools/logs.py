"""What the commands log, and where."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """The project's own log from INFO on, everybody else's warnings."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("widemesh").setLevel(logging.INFO)
