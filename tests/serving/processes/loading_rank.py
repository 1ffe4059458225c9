"""A server of a job whose model never comes to be loaded: it says "loading" when all processes are one JAX.

    python loading_rank.py FOLDER COORDINATOR SIZE RANK SETTINGS waits|stumbles

`stumbles`: when the job has ended, loading fails, as a collective does whose other end is gone.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from widemesh.serving import Engine, EngineConfig
from widemesh.serving.grpc.server import ServerConfig, serve
from widemesh.serving.process_config import ProcessConfig


class LoadingEngine(Engine):
    def _open_device(self, *args: Any) -> Any:
        print("loading", flush=True)
        while act == "waits" or self.job.end is None:
            time.sleep(0.05)
        raise RuntimeError("connection closed by peer")


if __name__ == "__main__":
    folder, coordinator, size, rank, settings, act = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    config = EngineConfig(model=folder, **json.loads(settings))
    place = ProcessConfig(coordinator=coordinator, num_processes=int(size), process_id=int(rank))
    serve(lambda on_join: LoadingEngine(config, place, on_join=on_join), ServerConfig(port=0), on_ready=print)
