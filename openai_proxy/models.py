"""The models that this proxy serves: one engine in Triton each, chosen by a request's `model`.

    catalogue --every LOOK_SECONDS--> engines --+--> ServedModel "a": session, tokenizer, templates
                                                +--> ServedModel "b": ...

Each has a session of its own, so one engine's death is nothing to the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from openai_proxy.catalogue import CatalogueLike
from openai_proxy.sessions import NO_CONNECTION, SessionLike, unready_reason
from openai_proxy.settings import EngineNames, ProxySettings
from openai_proxy.templates import Templates
from openai_proxy.textservice import TextLike
from tridentlm.errors import EngineDown, InvalidRequest, ModelNotFound, TridentError

log = logging.getLogger("openai_proxy")

SessionFactory = Callable[[ProxySettings], SessionLike]
TextFactory = Callable[[ProxySettings], TextLike]
CatalogueFactory = Callable[[ProxySettings], CatalogueLike]

FIRST_LOOK_SECONDS = 0.2
LOOK_SECONDS = 5.0
MISSED_LOOKS = 12
"""An engine that Triton has not listed for so many looks was unloaded for good. One whose stub is
started again comes back sooner."""


class ServedModel:
    """One engine. Its names are what it says they are, so they are known once it has spoken."""

    def __init__(
        self, settings: ProxySettings, open_session: SessionFactory, open_text: TextFactory
    ) -> None:
        self.engine = settings.engine
        self.session = open_session(settings)
        self.text = open_text(settings)
        self.templates = Templates(settings, self.text)
        self.missed = 0
        self._connecting = asyncio.create_task(self._connect())

    @property
    def status(self) -> dict[str, Any]:
        """The engine's last word; empty before the first."""
        return self.session.status or {}

    @property
    def names(self) -> list[str]:
        """The model's name and then its aliases; none before the engine's first word."""
        status = self.session.status
        return [] if status is None else [status["model"], *status.get("aliases", ())]

    @property
    def unready_reason(self) -> str | None:
        return unready_reason(self.session)

    def require_ready(self) -> str:
        """The model's name. Raises EngineDown with the reason when it is not served now."""
        reason = self.unready_reason
        if reason is not None:
            raise EngineDown(reason)
        return self.names[0]

    async def connected(self) -> None:
        """Returns once the engine has spoken, or the session has given up on a first connection."""
        await asyncio.wait({self._connecting})

    async def close(self) -> None:
        self._connecting.cancel()
        await self.session.close()
        await self.text.close()

    async def _connect(self) -> None:
        try:
            await self.session.start()
        except TridentError as error:
            log.warning("%s: still trying to connect: %s", self.engine, error)


class Models:
    """All of them. Made, started and closed in the application's event loop."""

    def __init__(
        self,
        settings: ProxySettings,
        open_session: SessionFactory,
        open_text: TextFactory,
        open_catalogue: CatalogueFactory,
    ) -> None:
        self._settings = settings
        self._factories = (open_session, open_text)
        self._catalogue = open_catalogue(settings)
        self._models: dict[str, ServedModel] = {}
        self._found = asyncio.Event()
        self._looking = asyncio.create_task(self._look_for_ever())

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    async def connected(self) -> None:
        """Returns once every model of the first look has spoken."""
        await self._found.wait()
        await asyncio.gather(*(model.connected() for model in self))

    async def close(self) -> None:
        self._looking.cancel()
        await asyncio.gather(*(model.close() for model in self))
        await self._catalogue.close()

    def choose(self, body: Mapping[str, Any]) -> ServedModel:
        """The one that the body's `model` names, or the only one.

        Raises ModelNotFound, InvalidRequest, or EngineDown while not all names are known.
        """
        name = body.get("model")
        if name is not None and not isinstance(name, str):
            raise InvalidRequest("model must be a string.", param="model")
        known = [model for model in self if model.names]
        if not known:
            raise EngineDown(NO_CONNECTION)
        if name is None and len(self._models) == 1:
            return known[0]
        if name is None:
            raise InvalidRequest(f"model is required: {_served(known)}.", param="model")
        return self.find(name)

    def find(self, name: str) -> ServedModel:
        """The one called `name`. Raises ModelNotFound, or EngineDown as `choose` does."""
        known = [model for model in self if model.names]
        for model in known:
            if name in model.names:
                return model
        if not known:
            raise EngineDown(NO_CONNECTION)
        if len(known) < len(self._models):
            raise EngineDown("The engines have not all told their names yet.")
        lora = any(name.startswith(f"{served}:") for model in known for served in model.names)
        hint = " LoRA adapters are not supported." if lora else ""
        raise ModelNotFound(
            f"The model {name!r} does not exist; {_served(known)}.{hint}", param="model"
        )

    async def _look_for_ever(self) -> None:
        trouble = ""
        while True:
            try:
                await self._look()
            except grpc.aio.AioRpcError as error:
                if trouble != (trouble := f"{error.code().name}: {error.details()}"):
                    log.warning("Triton does not tell its models: %s", trouble)
            known = self._found.is_set()
            await asyncio.sleep(LOOK_SECONDS if known else FIRST_LOOK_SECONDS)

    async def _look(self) -> None:
        found = {names.engine: names for names in await self._catalogue.find()}
        for names in found.values():
            if names.engine not in self._models:
                self._add(names)
        for engine, model in list(self._models.items()):
            model.missed = 0 if engine in found else model.missed + 1
            if model.missed >= MISSED_LOOKS:
                log.warning("%s is not in Triton any more", engine)
                del self._models[engine]
                await model.close()
        if self._models:
            self._found.set()

    def _add(self, names: EngineNames) -> None:
        model = ServedModel(self._settings.for_engine(names), *self._factories)
        self._models[names.engine] = model
        # A repository's first model is the first one listed, whatever Triton says first.
        first = self._settings.engine_names().engine
        self._models = dict(sorted(self._models.items(), key=lambda m: (m[0] != first, m[0])))
        log.info("serving the engine %s", names.engine)


def _served(models: list[ServedModel]) -> str:
    names = [name for model in models for name in model.names]
    return f"this server serves {', '.join(map(repr, names))}"
