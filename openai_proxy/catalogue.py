"""Which engines a Triton serves, asked of Triton itself.

An engine belongs to the `submit` ensemble that leads to it, and that names its tokenizer too:

    RepositoryIndex -> every ready model -> ModelConfig -> tridentlm_role = submit
                                                               `- steps: tokenizer, engine
"""

from __future__ import annotations

from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from openai_proxy.sessions import tls_options
from openai_proxy.settings import EngineNames, ProxySettings
from tridentlm_client import wire

ASK_SECONDS = 5.0
ROLE = "tridentlm_role"


class CatalogueLike(Protocol):
    """Where `Models` hears of engines."""

    async def find(self) -> list[EngineNames]:
        """The engines that can be asked now. Raises grpc.RpcError when Triton cannot be."""
        ...

    async def close(self) -> None: ...


class Catalogue:
    """Looks every model up once; what it is does not change while it has its name."""

    def __init__(self, settings: ProxySettings) -> None:
        tls = tls_options(settings)
        self._credentials = None if tls is None else tls.credentials()
        self._target = settings.triton
        self._known: dict[str, EngineNames | None] = {}
        self._connect()

    def _connect(self) -> None:
        self._channel = wire.open_channel(self._target, self._credentials)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def find(self) -> list[EngineNames]:
        try:
            return await self._find()
        except grpc.RpcError:
            # A channel that has failed waits longer and longer before it tries again.
            await self._channel.close()
            self._connect()
            raise

    async def _find(self) -> list[EngineNames]:
        request = service_pb2.RepositoryIndexRequest(ready=True)
        index = await self._stub.RepositoryIndex(request, timeout=ASK_SECONDS)
        names = sorted({model.name for model in index.models})
        for name in names:
            if name not in self._known:
                self._known[name] = await self._look_up(name)
        found = (self._known[name] for name in names)
        return [engine for engine in found if engine is not None]

    async def close(self) -> None:
        await self._channel.close()

    async def _look_up(self, name: str) -> EngineNames | None:
        request = service_pb2.ModelConfigRequest(name=name)
        answer = await self._stub.ModelConfig(request, timeout=ASK_SECONDS)
        return _names_of(answer.config)


def _names_of(config: Any) -> EngineNames | None:
    """None for a model that is no way into an engine."""
    if ROLE not in config.parameters or config.parameters[ROLE].string_value != "submit":
        return None
    steps = [step.model_name for step in config.ensemble_scheduling.step]
    return EngineNames(engine=steps[-1], submit=config.name, tokenizer=steps[0])


class FixedCatalogue:
    """The one engine that the settings name."""

    def __init__(self, settings: ProxySettings) -> None:
        self._names = settings.engine_names()

    async def find(self) -> list[EngineNames]:
        return [self._names]

    async def close(self) -> None:
        pass


def open_catalogue(settings: ProxySettings) -> CatalogueLike:
    return FixedCatalogue(settings) if settings.engine else Catalogue(settings)
