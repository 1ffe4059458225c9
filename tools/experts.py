"""`widemesh experts COMMAND`: look at the expert placement of a running server, and steer it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from widemesh.eplb import hash_text, parse_placement
from widemesh.model.config import ConfigError
from widemesh.serving.expert_control import model_flag
from widemesh.serving.expert_models import MODEL_NAMES, TARGET
from widemesh.serving.grpc.experts_client import ExpertsClient, check_steps
from widemesh.sharding.ticket import TicketError
from widemesh.sharding.ticket.addresses import split_address
from widemesh.tools.plotting import check_plotting
from widemesh.tools.settings import check_output, whole_file

_WIDTH = 100  # columns of the tables, at least


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsCommand:
    """What every command of the group needs: a server, and which of its models is meant."""

    address: str = "127.0.0.1:50051"  # HOST:PORT of a running server
    # whose experts: of the target, or of the draft, which a server has that runs with drafts
    model: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(MODEL_NAMES) + "}")] = MODEL_NAMES[TARGET]

    def __post_init__(self) -> None:
        if self.model not in MODEL_NAMES:
            raise ConfigError(f"model={self.model!r} is unknown; use {' or '.join(MODEL_NAMES)}")
        try:
            split_address(self.address)
        except TicketError:
            raise ConfigError(f"address={self.address!r} names no server; use HOST:PORT, as 127.0.0.1:50051") from None

    def connect(self) -> ExpertsClient:
        """A client of the server, to be closed."""
        return ExpertsClient(*split_address(self.address), model=self.model)

    @property
    def server(self) -> str:
        """In words, with the model if it is not the target."""
        return self.address if self.model == MODEL_NAMES[TARGET] else f"the {self.model} on {self.address}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show(ExpertsCommand):
    """Show where a server's experts lie and how busy they are.

    Each layer's line has its balancedness (mean rank load / maximum rank load), the hottest rank and how many times the
    mean load it has, the hottest expert with its share of the load and its copies, empty slots, and a heat map of all
    ranks. The last line is of all layers together.
    """

    out: Path | None = None  # PNG file for a picture: load by layer and rank, copies of each expert
    json: bool = False  # print a JSON object on the last line

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None:
            check_plotting(self.out, "out")
            check_output(self.out)

    def run(self) -> None:
        from rich.console import Console

        from widemesh.tools.experts_figures import as_json
        from widemesh.tools.experts_plot import plot_status
        from widemesh.tools.experts_table import print_status

        with self.connect() as client:
            status = client.status()
        console = Console(width=max(_WIDTH, Console().width))
        print_status(console, status)
        if self.out is not None:
            plot_status(self.out, status)
            console.print(f"load by rank and copies of experts: {self.out}", soft_wrap=True, markup=False)
        if self.json:
            print(json.dumps(as_json(self.address, status)), flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rebalance(ExpertsCommand):
    """Make a server measure load and plan a placement soon, instead of when its interval has passed."""

    steps: int | None = None  # recorded steps to measure first, at most a window; None: the server's own number

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps(self.steps)

    def run(self) -> None:
        with self.connect() as client:
            client.rebalance(self.steps)
        measured = "a few" if self.steps is None else str(self.steps)
        print(f"{self.server} makes a plan after {measured} recorded steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pause(ExpertsCommand):
    """Let a server make no new placement until `widemesh experts resume`, and withdraw an import that is "waiting"."""

    def run(self) -> None:
        with self.connect() as client:
            client.pause()
        print(f"{self.server} makes no new placement")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resume(ExpertsCommand):
    """Let a server go on after a pause, or after too many rebalances that were abandoned."""

    def run(self) -> None:
        with self.connect() as client:
            client.resume()
        print(f"{self.server} rebalances again")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(ExpertsCommand):
    """Write a server's placement to a JSON file."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]  # to write

    def run(self) -> None:
        check_output(self.file, "file")
        with self.connect() as client:
            text = client.export_placement()
        with whole_file(self.file) as scratch:
            scratch.write_text(text, encoding="utf-8")
        print(f"the placement of {self.server} is in {self.file}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import(ExpertsCommand):
    """Make a server move its experts to the placement in a file, while it serves.

    Give it to each process of an engine that has several; experts move once all have it.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]  # as `widemesh experts export` writes it

    def run(self) -> None:
        try:
            text = self.file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{self.file} is not text; use a file of `widemesh experts export`") from None
        with self.connect() as client:
            parse_placement(text, client.status().layout, str(self.file))  # its errors name the file
            placement = hash_text(client.import_placement(text))
        flag = model_flag(self.model)
        print(f"{self.server} moves to placement {placement} of {self.file} once every process of its engine has been "
              f"given it; until then `widemesh experts show{flag}` says waiting, and `widemesh experts pause{flag}` "
              "withdraws it")  # fmt: skip
