"""Command lines to dataclasses, with tyro; what a dataclass says about a wrong value is passed on as it is."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence

import tyro


def parse_flags[T](cls: type[T], prog: str, args: Sequence[str]) -> T:
    """An instance of `cls` from flags. Raises what its construction raises; other wrong flags exit with status 2."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(cls, prog=prog, args=args)
    except SystemExit as exit_:
        link: BaseException | None = exit_
        while link is not None:  # the innermost cause is a dataclass's own error, when there is one
            if isinstance(link, ValueError) and type(link) is not ValueError:
                raise link from None
            link = link.__cause__ or link.__context__
        sys.stderr.write(complaint.getvalue())
        raise
