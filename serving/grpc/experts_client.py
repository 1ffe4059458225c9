"""A small client of `widemesh.v1.Experts`: one blocking call for each thing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import grpc

from widemesh.model.config import ConfigError
from widemesh.serving.expert_control import ExpertStatus
from widemesh.serving.expert_models import MODEL_NAMES, TARGET
from widemesh.serving.grpc.client import ServerError, address_of, channel_options, server_error
from widemesh.serving.grpc.experts_convert import read_status
from widemesh.serving.grpc.protos import experts_pb2 as pb
from widemesh.serving.grpc.protos.experts_pb2_grpc import ExpertsStub

_MOST_STEPS = 2**32 - 1  # that the protocol can say
TIMEOUT_S = 60.0  # a call waits for a step, and the first one of a busy engine may be long


class ExpertsClient:
    """One connection to a server, about one of its models; use it as a context manager.

    `model` is "target" or "draft". Every call may raise ServerError, also for a model that the server has not.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 50051, model: str = MODEL_NAMES[TARGET]):
        self._address, self._model = address_of(host, port), model
        self._channel = grpc.insecure_channel(self._address, options=channel_options(host))
        self._stub = ExpertsStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._channel.close()

    def status(self) -> ExpertStatus:
        """Placement, load, and what is under way."""
        request = pb.GetExpertStatusRequest(include_load=True, include_placement=True, model=self._model)
        response = self._call(self._stub.GetStatus, request)
        try:
            return read_status(response)
        except ValueError as err:
            raise ServerError(f"{self._address} sends a status that cannot be read ({err}); use a client and a server "
                              "of one version") from None  # fmt: skip

    def rebalance(self, steps: int | None = None) -> None:
        """Make a plan after `steps` more recorded steps; None: after the server's own number of them.

        Raises ConfigError for a number that no window has.
        """
        check_steps(steps)
        self._call(self._stub.Rebalance, pb.RebalanceRequest(steps=steps, model=self._model))

    def pause(self) -> None:
        """Make no new plan until `resume`."""
        self._call(self._stub.Pause, pb.PauseRebalancingRequest(model=self._model))

    def resume(self) -> None:
        """Go on after `pause`, or after too many rebalances that were abandoned."""
        self._call(self._stub.Resume, pb.ResumeRebalancingRequest(model=self._model))

    def export_placement(self) -> str:
        """The placement that serves, as JSON."""
        request = pb.ExportPlacementRequest(model=self._model)
        return self._call(self._stub.ExportPlacement, request).placement_json

    def import_placement(self, placement_json: str) -> int:
        """Begin to move to this placement. Its hash, which `status` reports once every layer has moved."""
        request = pb.ImportPlacementRequest(placement_json=placement_json, model=self._model)
        return self._call(self._stub.ImportPlacement, request).placement_hash

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=TIMEOUT_S)
        except grpc.RpcError as err:
            assert isinstance(err, grpc.Call)  # whatever a stub raises
            code, details = err.code(), err.details()
            if code is grpc.StatusCode.UNIMPLEMENTED:
                raise ServerError(f"{self._address} does not offer widemesh.v1.Experts; it is another server, or one "
                                  "of an older version", code) from None  # fmt: skip
            raise server_error(self._address, code, details, "--address") from None


def check_steps(steps: int | None) -> None:
    """Refuse a number of steps that no server would take. Raises ConfigError."""
    if steps is not None and not 1 <= steps <= _MOST_STEPS:
        raise ConfigError(f"steps={steps} must be at least 1, and at most the server's window_size; leave it out for "
                          "the server's own number")  # fmt: skip
