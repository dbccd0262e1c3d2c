"""Triton's list of models, asked over gRPC: which of them are engines."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from openai_proxy.catalogue import Catalogue, FixedCatalogue, open_catalogue
from openai_proxy.settings import EngineNames, ProxySettings
from tests.proxy.faketriton import serving

FIRST = EngineNames("engine", "submit", "tokenizer")
SECOND = EngineNames("b_engine", "b_submit", "b_tokenizer")


class FakeRepository(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`submits`: the ensembles that lead to engines; other people's models stand beside them."""

    def __init__(self, *submits: EngineNames) -> None:
        self.submits = list(submits)
        self.looked_up: list[str] = []

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        assert request.ready
        answer = service_pb2.RepositoryIndexResponse()
        for names in self.submits:
            for name in names:
                answer.models.add(name=name, version="1", state="READY")
        answer.models.add(name="resnet", version="1", state="READY")
        answer.models.add(name="resnet", version="2", state="READY")
        return answer

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        self.looked_up.append(request.name)
        answer = service_pb2.ModelConfigResponse()
        answer.config.name = request.name
        for names in self.submits:
            if request.name == names.submit:
                answer.config.parameters["tridentlm_role"].string_value = "submit"
                for step in (names.tokenizer, names.engine):
                    answer.config.ensemble_scheduling.step.add(model_name=step)
            elif request.name == names.engine:
                answer.config.parameters["tridentlm_role"].string_value = "engine"
        return answer


def test_engines_are_found_by_the_ensembles_that_lead_to_them(port: int) -> None:
    async def run() -> None:
        catalogue = open_catalogue(ProxySettings(triton=f"127.0.0.1:{port}"))
        assert isinstance(catalogue, Catalogue)
        repository = FakeRepository(FIRST)
        async with serving(port, repository):
            assert await catalogue.find() == [FIRST]
            assert sorted(repository.looked_up) == ["engine", "resnet", "submit", "tokenizer"]
            repository.submits.append(SECOND)
            assert await catalogue.find() == [SECOND, FIRST]
            repository.submits.remove(FIRST)
            assert await catalogue.find() == [SECOND]
            assert len(repository.looked_up) == 7, "each is looked up once"
        await catalogue.close()

    asyncio.run(run())


def test_it_finds_them_as_soon_as_triton_is_there(port: int) -> None:
    """However often it has failed before."""

    async def run() -> None:
        catalogue = Catalogue(ProxySettings(triton=f"127.0.0.1:{port}"))
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError):
                await catalogue.find()
        async with serving(port, FakeRepository(FIRST)):
            assert await catalogue.find() == [FIRST]
        await catalogue.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"engine": "engine"}, FIRST),
        ({"engine": "b_engine"}, SECOND),
        ({"engine": "e", "submit": "s", "tokenizer_model": "t"}, EngineNames("e", "s", "t")),
    ],
)
def test_a_named_engine_is_the_only_one_and_names_its_companions(
    settings: dict[str, str], names: EngineNames
) -> None:
    catalogue = open_catalogue(ProxySettings(**settings))
    assert isinstance(catalogue, FixedCatalogue)
    assert asyncio.run(catalogue.find()) == [names]
