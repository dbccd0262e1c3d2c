"""A gRPC server in Triton's place, with a servicer that a test scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
from tritonclient.grpc import service_pb2_grpc

S = TypeVar("S", bound=service_pb2_grpc.GRPCInferenceServiceServicer)


@asynccontextmanager
async def serving(port: int, servicer: S) -> AsyncIterator[S]:
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(0)
