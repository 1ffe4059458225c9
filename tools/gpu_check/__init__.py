"""What somebody with a Hopper or Blackwell card runs: every kernel against its reference, then its time and its floor.

`__main__` starts processes (`supervise`), which run one op each (`worker`) on the cases that `cases` builds.
"""
