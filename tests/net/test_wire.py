"""The committed generated code is what proto/ says."""

import importlib
from importlib import resources
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

PROTO = Path(__file__).parents[2] / "proto"


@pytest.mark.parametrize("name", ["records", "exchange"])
def test_generated_code_equals_proto(name: str, tmp_path: Path) -> None:
    out = tmp_path / "set"
    common = resources.files("grpc_tools") / "_proto"
    file = f"spesd/v1/{name}.proto"
    arguments = ["protoc", f"-I{PROTO}", f"-I{common}", f"--descriptor_set_out={out}", file]
    assert protoc.main(arguments) == 0
    written = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]
    committed = descriptor_pb2.FileDescriptorProto()
    module = importlib.import_module(f"spesd.net.pb.spesd.v1.{name}_pb2")
    module.DESCRIPTOR.CopyToProto(committed)
    written.ClearField("source_code_info")
    for proto in (written, committed):
        for message in proto.message_type:
            for field in message.field:
                field.ClearField("json_name")  # filled in by some versions only
    assert committed == written
