"""Which of an engine's processes this one is. Importing this brings no jax."""

from __future__ import annotations

import dataclasses

from widemesh.model.config import ConfigError
from widemesh.sharding.ticket import TicketError
from widemesh.sharding.ticket.addresses import split_address


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The processes of one engine, which hold equal parts of its devices. Wrong values raise ConfigError."""

    coordinator: str | None = None  # HOST:PORT where process 0 is met by the others; the same for all of them
    num_processes: int = 1  # of the engine; prefill_devices and decode_devices are totals over them
    process_id: int = 0  # this one's number, from 0
    join_timeout_s: float = 60.0  # seconds that the processes wait for each other at the start

    def __post_init__(self) -> None:
        count = self.num_processes
        if count < 1:
            raise ConfigError(f"num_processes={count} must be at least 1; use 1 or more")
        if not 0 <= self.process_id < count:
            raise ConfigError(f"process_id={self.process_id} must be from 0 to {count - 1} with num_processes={count}")
        if self.join_timeout_s <= 0:
            raise ConfigError(f"join_timeout_s={self.join_timeout_s:g} must be above 0; use 60")
        if count > 1 and self.coordinator is None:
            raise ConfigError(f"num_processes={count} need a place to meet; give coordinator=HOST:PORT of process 0")
        if self.coordinator is not None:
            try:
                split_address(self.coordinator)
            except TicketError:
                raise ConfigError(f"coordinator={self.coordinator!r} is no address; use HOST:PORT") from None
