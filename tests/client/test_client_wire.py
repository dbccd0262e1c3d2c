from __future__ import annotations

import json

import pytest
from fake_triton import unpack
from tritonclient.grpc import service_pb2

from tridentlm_client import EngineDown, InternalError, InvalidRequest, Overloaded, wire


def test_strings_are_packed_as_triton_reads_them() -> None:
    values = ["", "a", b"\x00\xff", "ก😀", "x" * 70_000]
    encoded = [v.encode() if isinstance(v, str) else v for v in values]
    assert unpack(wire.pack_strings(values)) == encoded


def test_a_request_carries_its_tensors_and_typed_parameters() -> None:
    request = wire.infer_request(
        "engine",
        strings={"op": ["abort"], "uid": ["1", "2"]},
        parameters={"session": "s", "seq": 7, "stream": True},
        empty_final=True,
    )
    request = service_pb2.ModelInferRequest.FromString(request.SerializeToString())
    shapes = [(t.name, t.datatype, list(t.shape)) for t in request.inputs]
    assert shapes == [("op", "BYTES", [1]), ("uid", "BYTES", [2])]
    assert [unpack(raw) for raw in request.raw_input_contents] == [[b"abort"], [b"1", b"2"]]
    assert request.parameters["session"].string_param == "s"
    assert request.parameters["seq"].int64_param == 7
    assert request.parameters["stream"].bool_param is True
    assert request.parameters["triton_enable_empty_final_response"].bool_param is True


def test_an_output_is_found_by_name() -> None:
    response = service_pb2.ModelInferResponse()
    for name, value in (("other", b"no"), ("frame", b"[1]")):
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.raw_output_contents.append(wire.pack_strings([value]))
    frame = wire.read_string(response, "frame")
    assert frame is not None
    assert bytes(frame) == b"[1]"
    assert wire.read_string(response, "outcomes") is None
    assert not wire.is_final(response)
    assert "triton_final_response" not in response.parameters


@pytest.mark.parametrize("prefix", ["", "in ensemble 'generate', ", "[StatusCode.INTERNAL] "])
def test_an_error_payload_is_found_behind_any_prefix(prefix: str) -> None:
    for error in (
        InvalidRequest("Not {so}.", param="top_p"),
        Overloaded("The queue is not ready for you."),
    ):
        text = prefix + json.dumps(error.payload())
        parsed = wire.parse_error(text)
        assert type(parsed) is type(error)
        assert parsed.payload() == error.payload()
        assert not wire.says_unavailable(text)


@pytest.mark.parametrize(
    "text",
    [
        "Request for unknown model: 'submit' has no available versions",
        "Stub process 'engine_0_0' is not healthy.",
        "Server not ready",
        "in ensemble 'submit', [request id: 3] Server is stopping, scheduler for model has stopped "
        "accepting new inference requests",
        "in ensemble 'submit', Request for unknown model: 'engine' has no available versions",
    ],
)
def test_tritons_words_for_a_lost_model_mean_that_the_engine_is_down(text: str) -> None:
    assert wire.says_unavailable(text)
    assert isinstance(wire.parse_error(text), EngineDown)


@pytest.mark.parametrize("text", ["boom", "expected {x}", '{"a": 1}', "{", ""])
def test_any_other_text_is_an_internal_error_with_that_text(text: str) -> None:
    error = wire.parse_error(text)
    assert type(error) is InternalError
    assert error.message == text
    assert not wire.says_unavailable(text)
