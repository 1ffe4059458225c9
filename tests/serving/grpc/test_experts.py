"""`widemesh.v1.Experts` over a real connection: every call, every error with its code and sentence."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from widemesh.eplb import ExpertLayout, dump_placement, hash_text, placement_hash
from widemesh.model.config import ConfigError
from widemesh.serving.expert_control import EplbBusy, EplbOff, EplbPaused
from widemesh.serving.grpc.client import ServerError
from widemesh.serving.grpc.experts_client import ExpertsClient
from widemesh.serving.grpc.experts_convert import read_status, write_status
from widemesh.serving.grpc.protos import experts_pb2 as pb
from widemesh.serving.grpc.protos.experts_pb2_grpc import ExpertsStub
from widemesh.serving.grpc.server import GrpcServer, ServerConfig
from widemesh.serving.request import Status

SERVICE = "widemesh.v1.Experts"
EVERYTHING = pb.GetExpertStatusRequest(include_load=True, include_placement=True)
CALLS = {
    "GetStatus": pb.GetExpertStatusRequest(), "Rebalance": pb.RebalanceRequest(), "Pause": pb.PauseRebalancingRequest(),
    "Resume": pb.ResumeRebalancingRequest(), "ExportPlacement": pb.ExportPlacementRequest(),
    "ImportPlacement": pb.ImportPlacementRequest(placement_json="{}"),
}  # fmt: skip


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"widemesh_test_{name}", Path(__file__).parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


fake = _load("fake_experts")


@pytest.fixture
def served(make_engine, serving):
    """The async context manager `served(experts, draft)`, which yields a stub and the `Served` of the test's engine."""

    @contextlib.asynccontextmanager
    async def serve(experts: Any, draft: Any = None) -> AsyncIterator[tuple[ExpertsStub, Any]]:
        engine = make_engine()
        engine.experts, engine.draft_experts = experts, draft
        async with asyncio.timeout(20), serving(engine) as running:
            yield ExpertsStub(running.channel), running

    return serve


async def refused(call):
    """The status of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


# --- calls -------------------------------------------------------------------------------------------------------


def test_status_has_arrays_only_when_asked(served):
    experts = fake.FakeExperts(is_disabled=True, last_failure="rank 3: a bad row")

    async def main():
        async with served(experts) as (stub, _):
            return await stub.GetStatus(pb.GetExpertStatusRequest()), await stub.GetStatus(EVERYTHING)

    lean, full = asyncio.run(main())
    assert not lean.HasField("load") and not lean.HasField("slot_owner")
    assert (lean.model, lean.phase, lean.steps_to_trigger, lean.load_steps) == ("target", "idle", 120, 750)
    assert dict(lean.rebalances) == {"committed": 2, "skipped": 1, "abandoned": 0}
    assert (lean.moved_rows, lean.least_rows, lean.moved_bytes) == (40, 38, 3 << 20)
    assert (lean.is_paused, lean.is_disabled, lean.last_failure) == (False, True, "rank 3: a bad row")
    assert (lean.layout.num_slots, lean.layout.ranks) == (8, 4)
    assert lean.balancedness == pytest.approx(35 / 80)  # 140 rows on 4 ranks, 80 on the busiest
    assert list(full.slot_owner.shape) == list(full.load.shape) == [3, 8]
    assert list(full.slot_owner.values) == [0, 1, 2, 3, 4, 5, 0, 1] * 3
    assert list(full.load.values)[8:16] == [10, 10, 70, 10, 10, 10, 10, 10]
    assert not any(name.startswith("MainThread") for name in experts.threads)  # streams are not held up


def test_a_status_survives_the_way(served):
    experts = fake.FakeExperts(feasible=0.75, phase="waiting", imported_hash=-57916389)
    experts.slot_owner[0, 7] = -1
    experts.load[2, 1] = 2**40
    sent = experts.status()
    got = read_status(pb.GetExpertStatusResponse.FromString(
        write_status(sent, include_load=True, include_placement=True).SerializeToString()))  # fmt: skip
    for field in dataclasses.fields(sent):
        ours, theirs = getattr(sent, field.name), getattr(got, field.name)
        if isinstance(ours, np.ndarray):
            assert theirs.dtype == ours.dtype
            np.testing.assert_array_equal(theirs, ours)
        else:
            assert theirs == ours
    with pytest.raises(ValueError, match=r"shape \(\) with 0 values; it must be \(3, 8\)"):
        read_status(write_status(sent, include_load=False, include_placement=True))


def test_steering_reaches_the_control(served):
    experts = fake.FakeExperts()

    async def main():
        async with served(experts) as (stub, _):
            await stub.Rebalance(pb.RebalanceRequest())
            await stub.Rebalance(pb.RebalanceRequest(steps=7))
            await stub.Pause(CALLS["Pause"])
            paused = (await stub.GetStatus(pb.GetExpertStatusRequest())).is_paused
            await stub.Resume(CALLS["Resume"])
            return paused, (await stub.GetStatus(pb.GetExpertStatusRequest())).is_paused

    assert asyncio.run(main()) == (True, False)
    assert experts.asked == [("rebalance", None), ("rebalance", 7), ("pause",), ("resume",)]


def test_a_placement_goes_out_and_comes_back(served):
    experts = fake.FakeExperts()

    async def main():
        async with served(experts) as (stub, _):
            out = await stub.ExportPlacement(pb.ExportPlacementRequest())
            content = json.loads(out.placement_json)
            assert content.pop("hash") == hash_text(out.placement_hash)
            assert out.placement_hash == placement_hash(experts.slot_owner)
            content["slot_owner"][1] = [0, 2, 2, 3, 4, 5, 0, 1]
            back = await stub.ImportPlacement(pb.ImportPlacementRequest(placement_json=json.dumps(content)))
            return back.placement_hash, (await stub.GetStatus(EVERYTHING))

    found, status = asyncio.run(main())
    assert found == status.placement_hash == placement_hash(experts.slot_owner)
    assert list(status.slot_owner.values)[8:16] == [0, 2, 2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize("name", CALLS)
def test_a_request_may_name_the_model(served, name):
    """Without a name it means the target."""
    layout = ExpertLayout(num_layers=1, num_experts=4, ranks=4)
    target, draft = fake.FakeExperts(), fake.FakeExperts(layout, model="draft")

    def request(model: str | None, control: Any) -> Any:
        given = pb.ImportPlacementRequest(placement_json=dump_placement(control.slot_owner, control.layout))
        found = given if name == "ImportPlacement" else type(CALLS[name])()
        if model is not None:
            found.model = model
        return found

    async def main():
        async with served(target, draft) as (stub, _):
            found = []
            for model, control in ((None, target), ("target", target), ("draft", draft)):
                target.threads.clear(), draft.threads.clear()
                found.append((await getattr(stub, name)(request(model, control)), bool(draft.threads)))
                assert bool(target.threads) != bool(draft.threads)
            return found

    (default, in_draft), target_named, draft_named = asyncio.run(main())
    assert not in_draft and target_named == (default, False) and draft_named[1]
    if name == "GetStatus":
        assert (default.model, draft_named[0].model) == ("target", "draft")
        assert draft_named[0].layout.num_experts == 4
    if name.endswith("Placement"):
        assert draft_named[0].placement_hash == placement_hash(draft.slot_owner) != default.placement_hash


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no", "placement is not JSON (Expecting value: line 1 column 1 (char 0)); use a file that was exported"),
        ("[" * 100_000, "placement is not JSON (maximum recursion depth exceeded"),
        ("{}", "placement has no list slot_owner; write one list of slot owners per layer under that name"),
        ('{"slot_owner": [[0, 1, 2, 3, 4, 5, 0, 1]]}', "placement has shape (1, 8); it must be (3, 8): 3 layers"),
        ('{"slot_owner": [[0], [1, 2], [3]]}', "placement: layer 0 has length 1; it must be 8, an owner"),
        (json.dumps({"slot_owner": [[0, 1, 2, 3, 4, 4, 0, 1]] * 3}),
         "placement: no slot of layer 0 holds expert 5; every expert from 0 to 5 needs at least one slot"),
        (json.dumps({"slot_owner": [[0, 1, 2, 3, 4, 6, 0, 1]] * 3}), "slot 5 of layer 0 holds 6; it must hold an"),
        (json.dumps({"slot_owner": [[0, 1, 2, 3, 4, 5.5, 0, 1]] * 3}), "placement: slot 5 of layer 0 holds 5.5; it"),
        (json.dumps({"ranks": 8, "slot_owner": []}), "placement was made for ranks=8; it must be 4: use"),
        (json.dumps({"hash": 5, "slot_owner": [[0, 1, 2, 3, 4, 5, 0, 1]] * 3}), "does not have the hash that stands"),
    ],
)  # fmt: skip
def test_a_placement_that_does_not_fit_is_refused(served, text, words):
    experts = fake.FakeExperts()

    async def main():
        async with served(experts) as (stub, _):
            return await refused(stub.ImportPlacement(pb.ImportPlacementRequest(placement_json=text)))

    code, detail = asyncio.run(main())
    assert code is grpc.StatusCode.INVALID_ARGUMENT and words in detail and "\n" not in detail
    assert experts.asked == []


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("model", "words"), [
    ("draft", "model='draft' is not served here; use target"),
    ("", "model='' is not served here; use target"),
    ("Target", "model='Target' is not served here; use target or draft"),
])  # fmt: skip
def test_a_model_that_is_not_served_is_refused(served, name, model, words):
    target = fake.FakeExperts()
    draft = fake.FakeExperts(model="draft") if words.endswith("draft") else None
    request = type(CALLS[name])()
    request.model = model

    async def main():
        async with served(target, draft) as (stub, _):
            return await refused(getattr(stub, name)(request))

    assert asyncio.run(main()) == (grpc.StatusCode.INVALID_ARGUMENT, words)
    assert target.asked == [] and (draft is None or draft.asked == [])


@pytest.mark.parametrize("steps", [0, 101, 2**32 - 1])
def test_steps_outside_a_window_are_refused(served, steps):
    async def main():
        async with served(fake.FakeExperts()) as (stub, _):
            return await refused(stub.Rebalance(pb.RebalanceRequest(steps=steps)))

    code, detail = asyncio.run(main())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert detail == f"steps={steps} must be between 1 and window_size=100; leave it out for a window"


def test_where_rebalancing_is_off_only_looking_is_possible(served):
    experts = fake.FakeExperts(phase="off")

    async def main():
        async with served(experts) as (stub, _):
            out = await stub.ExportPlacement(pb.ExportPlacementRequest())
            load = pb.ImportPlacementRequest(placement_json=out.placement_json)
            calls = [stub.Rebalance(CALLS["Rebalance"]), stub.Pause(CALLS["Pause"]), stub.Resume(CALLS["Resume"]),
                     stub.ImportPlacement(load), stub.ImportPlacement(pb.ImportPlacementRequest())]  # fmt: skip
            return await stub.GetStatus(EVERYTHING), [await refused(call) for call in calls]

    status, statuses = asyncio.run(main())
    assert status.phase == "off" and len(status.slot_owner.values) == 24
    sentence = "enable_eplb=False: experts stay where they are; start the server with --enable-eplb"
    assert statuses == [(grpc.StatusCode.FAILED_PRECONDITION, sentence)] * 5


def test_an_import_while_experts_move_is_aborted(served):
    async def main():
        async with served(fake.FakeExperts(phase="migrating")) as (stub, _):
            out = await stub.ExportPlacement(pb.ExportPlacementRequest())
            return await refused(stub.ImportPlacement(pb.ImportPlacementRequest(placement_json=out.placement_json)))

    code, detail = asyncio.run(main())
    assert code is grpc.StatusCode.ABORTED
    assert detail == "experts are moving already; wait until `widemesh experts show` says idle"
    assert (EplbBusy().status, EplbOff().status) == (Status.ABORTED, Status.FAILED_PRECONDITION)


def test_a_rebalance_while_paused_is_refused(served):
    experts = fake.FakeExperts()
    experts.error = EplbPaused()

    async def main():
        async with served(experts) as (stub, _):
            return await refused(stub.Rebalance(pb.RebalanceRequest()))

    assert asyncio.run(main()) == (grpc.StatusCode.FAILED_PRECONDITION,
                                   "rebalancing is paused; run `widemesh experts resume` first")  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_defect_and_a_closed_engine_are_told_apart(served, name, caplog):
    experts = fake.FakeExperts()
    experts.error = RuntimeError("the device is on fire\nand a second line")

    async def main():
        async with served(experts) as (stub, running):
            defect = await refused(getattr(stub, name)(CALLS[name]))
            closing = getattr(stub, name)(CALLS[name])

            def close_and_raise() -> None:
                running.engine.is_alive = False
                raise RuntimeError("the engine is closed")

            experts._enter = close_and_raise
            during = await refused(closing)
            return defect, during, await refused(getattr(stub, name)(CALLS[name]))

    (code, detail), *closed = asyncio.run(main())
    assert code is grpc.StatusCode.INTERNAL
    assert detail == "the call failed inside the engine (RuntimeError: the device is on fire); see the server's log"
    gone = (grpc.StatusCode.UNAVAILABLE, "the engine has stopped; see the server's log and restart it")
    assert closed == [gone, gone]
    assert "a call about expert placement failed" in caplog.text


@pytest.mark.parametrize("name", CALLS)
def test_until_the_model_is_loaded_calls_are_unavailable(name):
    async def main():
        server = GrpcServer(ServerConfig(port=0))
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            found = await refused(getattr(ExpertsStub(channel), name)(CALLS[name]))
        await server.stop()
        return found

    code, detail = asyncio.run(main())
    assert code is grpc.StatusCode.UNAVAILABLE and "the model is still loading" in detail


# --- how others find it ------------------------------------------------------------------------------------------


def test_reflection_and_health_know_the_service(served):
    def look(port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            service = DescriptorPool(database).FindServiceByName(SERVICE)
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
            return set(database.get_services()), set(service.methods_by_name), health.status

    async def main():
        async with served(fake.FakeExperts()) as (_, running):
            return await asyncio.to_thread(look, running.server.port)

    services, methods, health = asyncio.run(main())
    assert SERVICE in services and methods == set(CALLS)
    assert health == health_pb2.HealthCheckResponse.SERVING


# --- the client --------------------------------------------------------------------------------------------------


def test_the_client_does_every_call(served):
    experts = fake.FakeExperts()

    def work(port):
        with ExpertsClient("127.0.0.1", port) as client:
            client.rebalance(3)
            client.rebalance()
            client.pause()
            client.resume()
            found = client.import_placement(client.export_placement())
            status = client.status()
            with pytest.raises(ServerError) as caught:
                client.rebalance(101)
            return found, status, caught.value

    async def main():
        async with served(experts) as (_, running):
            return running.server.port, *await asyncio.to_thread(work, running.server.port)

    port, found, status, error = asyncio.run(main())
    assert found == status.placement_hash == placement_hash(experts.slot_owner)
    np.testing.assert_array_equal(status.load, experts.load)
    np.testing.assert_array_equal(status.slot_owner, experts.slot_owner)
    assert experts.asked[:5] == [("rebalance", 3), ("rebalance", None), ("pause",), ("resume",), ("import",)]
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert str(error).startswith(f"127.0.0.1:{port} answered INVALID_ARGUMENT: steps=101 must be between 1 and")


def test_a_client_of_the_draft(served):
    target, draft = fake.FakeExperts(), fake.FakeExperts(model="draft")
    draft.slot_owner[1, 7] = 3

    def work(port):
        with ExpertsClient("127.0.0.1", port, model="draft") as client:
            client.rebalance(3)
            client.pause()
            client.resume()
            client.import_placement(client.export_placement())
            status = client.status()
            draft.phase = "migrating"
            with pytest.raises(ServerError) as caught:
                client.import_placement(client.export_placement())
            return status, str(caught.value)

    async def main():
        async with served(target, draft) as (_, running):
            return await asyncio.to_thread(work, running.server.port)

    status, error = asyncio.run(main())
    assert status.model == "draft" and status.slot_owner[1, 7] == 3
    assert draft.asked[:4] == [("rebalance", 3), ("pause",), ("resume",), ("import",)] and target.asked == []
    assert error.endswith("experts are moving already; wait until `widemesh experts show --model draft` says idle")


@pytest.mark.parametrize("steps", [-1, 0, 2**32])
def test_steps_that_no_window_has_are_refused_before_they_are_sent(steps):
    with ExpertsClient("127.0.0.1", 1) as client, pytest.raises(ConfigError) as caught:
        client.rebalance(steps)
    assert str(caught.value) == (f"steps={steps} must be at least 1, and at most the server's window_size; leave it "
                                 "out for the server's own number")  # fmt: skip


def test_a_server_without_the_service_is_named():
    async def main():
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            with ExpertsClient("127.0.0.1", port) as client, pytest.raises(ServerError) as caught:
                await asyncio.to_thread(client.status)
            return port, str(caught.value)
        finally:
            await server.stop(0)

    port, sentence = asyncio.run(main())
    assert sentence == (f"127.0.0.1:{port} does not offer widemesh.v1.Experts; it is another server, or one of an "
                        "older version")  # fmt: skip
