"""Responses kept in memory, within a bound, for retrieval and for going on with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from openai_proxy.errors import HttpError
from openai_proxy.settings import ProxySettings
from tridentlm.errors import InvalidRequest

MAX_BYTES = 256 << 20


@dataclass(slots=True)
class Stored:
    """`messages`: the conversation with its answer. `cancel` is there while it is generated."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    cancel: Callable[[], None] | None
    size: int


class ResponseStore:
    """The oldest go when there are more than `max_stored_responses`, or MAX_BYTES of them.

    It lives in one process, so that it works with one worker only.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self._most = settings.max_stored_responses
        self._alone = settings.workers == 1
        self._entries: dict[str, Stored] = {}
        self._size = 0

    @property
    def works(self) -> bool:
        return self._alone and self._most > 0

    def refusal(self, param: str) -> InvalidRequest:
        why = "--workers 1" if not self._alone else "--max-stored-responses above 0"
        return InvalidRequest(
            f"{param}: responses are kept in the memory of one process, which needs {why}.",
            param=param,
            code="unsupported_parameter",
        )

    def put(
        self,
        response: dict[str, Any],
        messages: list[dict[str, Any]],
        cancel: Callable[[], None] | None = None,
    ) -> None:
        """Keeps a response, in place of an earlier state of it."""
        self.drop(response["id"])
        size = len(orjson.dumps([response, messages]))
        self._entries[response["id"]] = Stored(response, messages, cancel, size)
        self._size += size
        while len(self._entries) > self._most or self._size > MAX_BYTES:
            self.drop(next(iter(self._entries)))

    def get(self, response_id: str) -> Stored:
        """Raises HttpError 404, or the reason why nothing is kept."""
        if not self.works:
            raise self.refusal("response_id")
        entry = self._entries.get(response_id)
        if entry is None:
            raise HttpError(404, f"There is no response {response_id!r}.", "response_not_found")
        return entry

    def conversation(self, response_id: Any) -> list[dict[str, Any]]:
        """The messages to go on with. Raises InvalidRequest and HttpError."""
        if not self.works:
            raise self.refusal("previous_response_id")
        name = "previous_response_id"
        if not isinstance(response_id, str):
            raise InvalidRequest(f"{name} must be a string.", param=name)
        entry = self._entries.get(response_id)
        if entry is not None and entry.cancel is not None:
            raise InvalidRequest(f"The response {response_id!r} is not finished.", param=name)
        if entry is None:
            message = f"There is no response {response_id!r} to go on with."
            missing = HttpError(404, message, "previous_response_not_found")
            missing.param = name
            raise missing
        return entry.messages

    def drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self._size -= entry.size
