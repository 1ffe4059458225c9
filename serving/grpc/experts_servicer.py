"""`widemesh.v1.Experts` over an engine's expert control: what each call does, and which status its errors get."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc

from widemesh.eplb import dump_placement, parse_placement, placement_hash
from widemesh.model.config import ConfigError
from widemesh.serving.expert_control import EplbOff, ExpertControl, ExpertControlError, control_of
from widemesh.serving.expert_models import MODEL_NAMES, TARGET
from widemesh.serving.grpc.experts_convert import write_status
from widemesh.serving.grpc.protos import experts_pb2 as pb
from widemesh.serving.grpc.protos.experts_pb2_grpc import ExpertsServicer
from widemesh.serving.grpc.servicer import abort

if TYPE_CHECKING:
    from widemesh.serving.engine import Engine

logger = logging.getLogger(__name__)

_Request = (
    pb.GetExpertStatusRequest | pb.RebalanceRequest | pb.PauseRebalancingRequest | pb.ResumeRebalancingRequest
    | pb.ExportPlacementRequest | pb.ImportPlacementRequest
)  # fmt: skip

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Experts"].full_name


class ExpertsService(ExpertsServicer):
    """The service, for each model of an engine. `ready_engine` gives the engine or ends the call with UNAVAILABLE.

    The control waits for the engine's next step, so it is asked on a worker thread: streams go on meanwhile.
    """

    def __init__(self, ready_engine: Callable[[grpc.aio.ServicerContext], Awaitable[Engine]]):
        self._ready_engine = ready_engine

    async def GetStatus(
        self, request: pb.GetExpertStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetExpertStatusResponse:
        def ask(control: ExpertControl) -> pb.GetExpertStatusResponse:
            return write_status(control.status(), include_load=request.include_load,
                                include_placement=request.include_placement)  # fmt: skip

        return await self._ask(request, ask, context)

    async def Rebalance(
        self, request: pb.RebalanceRequest, context: grpc.aio.ServicerContext
    ) -> pb.RebalanceResponse:
        steps = request.steps if request.HasField("steps") else None
        await self._ask(request, lambda control: control.rebalance(steps), context)
        return pb.RebalanceResponse()

    async def Pause(
        self, request: pb.PauseRebalancingRequest, context: grpc.aio.ServicerContext
    ) -> pb.PauseRebalancingResponse:
        await self._ask(request, lambda control: control.pause(), context)
        return pb.PauseRebalancingResponse()

    async def Resume(
        self, request: pb.ResumeRebalancingRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeRebalancingResponse:
        await self._ask(request, lambda control: control.resume(), context)
        return pb.ResumeRebalancingResponse()

    async def ExportPlacement(
        self, request: pb.ExportPlacementRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExportPlacementResponse:
        def ask(control: ExpertControl) -> pb.ExportPlacementResponse:
            status = control.status()
            return pb.ExportPlacementResponse(
                placement_json=dump_placement(status.slot_owner, status.layout), placement_hash=status.placement_hash
            )

        return await self._ask(request, ask, context)

    async def ImportPlacement(
        self, request: pb.ImportPlacementRequest, context: grpc.aio.ServicerContext
    ) -> pb.ImportPlacementResponse:
        def ask(control: ExpertControl) -> pb.ImportPlacementResponse:
            status = control.status()
            if status.phase == "off":  # whatever the placement is
                raise EplbOff
            owner = parse_placement(request.placement_json, status.layout)
            control.import_placement(owner)
            return pb.ImportPlacementResponse(placement_hash=placement_hash(owner))

        return await self._ask(request, ask, context)

    async def _ask[T](
        self, request: _Request, ask: Callable[[ExpertControl], T], context: grpc.aio.ServicerContext
    ) -> T:
        """What `ask` answers of the model that the request means; its errors end the call."""
        engine = await self._ready_engine(context)
        model = request.model if request.HasField("model") else MODEL_NAMES[TARGET]
        try:
            control = control_of(model, engine.experts, engine.draft_experts)
            return await asyncio.to_thread(ask, control)
        except ConfigError as err:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(err))
        except ExpertControlError as err:
            await abort(context, grpc.StatusCode[err.status.value], str(err))
        except Exception as err:
            await self._ready_engine(context)  # the engine may have been closed meanwhile; that is no defect
            logger.exception("a call about expert placement failed")
            reason = str(err).split("\n", 1)[0][:200]
            await abort(context, grpc.StatusCode.INTERNAL,
                        f"the call failed inside the engine ({type(err).__name__}: {reason}); see the server's log")
