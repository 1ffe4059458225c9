"""The code made from experts.proto is what the .proto says now."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from widemesh.serving.grpc.protos import experts_pb2, experts_pb2_grpc

ROOT = Path(__file__).parents[3]
PROTO = "widemesh/serving/grpc/protos/experts.proto"


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorProto:
    """What a compiler reads from the .proto."""
    out = tmp_path_factory.mktemp("protoc") / "set"
    assert protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={out}", str(ROOT / PROTO)]) == 0
    (found,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return found


def test_the_messages_are_current(described: descriptor_pb2.FileDescriptorProto) -> None:
    committed = descriptor_pb2.FileDescriptorProto.FromString(experts_pb2.DESCRIPTOR.serialized_pb)
    for message in [*described.message_type, *committed.message_type]:
        for one in (message, *message.nested_type):
            for field in one.field:
                field.ClearField("json_name")  # follows from the field's name; only some compilers write it
    assert committed == described, "make the code anew; experts.proto says how"
    stubs = (ROOT / PROTO).with_name("experts_pb2.pyi").read_text(encoding="utf-8")
    assert all(f"\nclass {message.name}(" in stubs for message in described.message_type)


def test_the_service_is_current(described: descriptor_pb2.FileDescriptorProto) -> None:
    (service,) = described.service
    methods = {method.name for method in service.method}
    assert methods == {"GetStatus", "Rebalance", "Pause", "Resume", "ExportPlacement", "ImportPlacement"}
    assert {name for name in vars(experts_pb2_grpc.ExpertsServicer) if not name.startswith("_")} == methods


def test_the_code_was_made_with_the_oldest_grpc_that_is_allowed() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"grpcio>={experts_pb2_grpc.GRPC_GENERATED_VERSION}"' in project
