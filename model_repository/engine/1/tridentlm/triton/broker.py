"""The engine model without Triton: admission, and what a client can ask of a running server.

    execute() --submit, generate, ack, abort--> Broker --adds, aborts--> engine process
                                                  |                          |
                                                Ledger                       v one message a step
    sessions' frames, plain responses <------------------------------------ Pump

Threads: Triton's (enters here), the pump and the plain sender.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tridentlm import __version__
from tridentlm.config import EngineSettings
from tridentlm.core.policy import check_priority
from tridentlm.core.request import Limits, Request, SamplingParams
from tridentlm.errors import EngineDown, InvalidRequest, Overloaded, TridentError
from tridentlm.protocol import VERSION
from tridentlm.simulated import check_simulated
from tridentlm.streams import Outlet, TextStream
from tridentlm.text import Tokenizer
from tridentlm.tokenlog import TokenLog
from tridentlm.triton.ledger import Key, Ledger
from tridentlm.triton.metrics import Metrics
from tridentlm.triton.plain import PlainRequest, PlainResponder, PlainSender
from tridentlm.triton.process import EngineProcess
from tridentlm.triton.pump import Pump
from tridentlm.triton.sessions import FrameSender, Session

Ids = npt.NDArray[np.int32]


class Broker:
    """Decides what is accepted; from then on a request has exactly one terminal output."""

    def __init__(
        self,
        settings: EngineSettings,
        model: str,
        tokenizer: Tokenizer,
        process: EngineProcess,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._model = model
        self._tokenizer = tokenizer
        self._process = process
        self._metrics = metrics
        self._ledger = Ledger()
        self._numbers = itertools.count(1)
        # The relay outlives this stub and remembers whom it has aborted.
        self._life = secrets.token_hex(4)
        self._plain_sender = PlainSender(lambda stream: process.abort([stream.id]))
        self._pump = Pump(settings, self._ledger, process, metrics, self.status)

    def start(self) -> None:
        """Starts the engine process and the pump; returns when the engine can take requests.

        Raises the TridentError that the engine process failed with.
        """
        self._process.start()
        self._pump.start()

    def close(self) -> None:
        """Ends every request with an error, every session, the threads and the engine process."""
        self._pump.close()
        self._plain_sender.close()
        self._process.close()
        self._metrics.close()

    def submit(self, session_id: str, entries: Sequence[dict[str, Any]], ids: Ids) -> list[Any]:
        """Takes a session's requests; for each {"uid", "prompt_tokens"} or {"uid", "error"}.

        `entries[i]` is {"uid", "n", "sampling", "return_token_ids"} and owns the next n of `ids`,
        or {"uid", "error"} when the tokenizer already refused it.
        """
        outcomes: list[dict[str, Any]] = []
        accepted: list[Request] = []
        offset = 0
        with self._ledger.lock:
            session = self._ledger.session(session_id)
            if session is None:
                raise InvalidRequest(
                    "This session is not open.", param="session", code="no_session"
                )
            for entry in entries:
                uid = str(entry["uid"])
                if "error" in entry:
                    outcomes.append({"uid": uid, "error": entry["error"]})
                    continue
                prompt = ids[offset : offset + entry["n"]]
                offset += entry["n"]
                key, keep_ids = (session_id, uid), entry["return_token_ids"]
                try:
                    request, _ = self._admit(key, prompt, entry["sampling"], session, keep_ids)
                except TridentError as error:
                    outcomes.append({"uid": uid, "error": error.payload()})
                    continue
                accepted.append(request)
                outcomes.append({"uid": uid, "prompt_tokens": len(prompt)})
            self._process.add(accepted)
        return outcomes

    def generate(
        self,
        ids: Ids,
        sampling: dict[str, Any],
        responder: PlainResponder,
        *,
        streaming: bool,
        relayed: bool,
    ) -> None:
        """Takes a plain request, whose responses go to `responder`. Raises a TridentError."""
        outlet = PlainRequest(responder, self._plain_sender, streaming=streaming, relayed=relayed)
        with self._ledger.lock:
            key = ("", f"plain-{self._life}-{next(self._numbers)}")
            request, outlet.stream = self._admit(key, ids, sampling, outlet, keep_ids=True)
            self._plain_sender.track(outlet)
            self._process.add([request])

    def abort(self, session_id: str, uids: Sequence[str]) -> None:
        """Ends requests early. An unknown uid may still be on its way: it is remembered a while."""
        with self._ledger.lock:
            for uid in uids:
                stream = self._ledger.find((session_id, uid))
                if stream is None:
                    self._ledger.note_early_abort((session_id, uid))
                else:
                    self._process.abort([stream.id])

    def passed(self, count: int) -> None:
        """The relay has passed on `count` responses of plain requests."""
        self._plain_sender.passed(count)

    def open_session(self, session_id: str, sender: FrameSender) -> None:
        """Opens a session, or moves an open one to a new stream."""
        if self._pump.draining:
            raise EngineDown("The server is shutting down.", code="draining")
        self._ledger.open_session(session_id, sender)
        self._pump.announce()

    def acknowledge(self, session_id: str, seq: int) -> None:
        session = self._ledger.session(session_id)
        if session is not None:
            session.acknowledge(seq, time.monotonic())

    def close_session(self, session_id: str) -> None:
        self._pump.close_session(session_id)

    def drain(self) -> None:
        """No new requests; running ones finish, at most `drain_seconds`; then sessions end."""
        self._pump.drain()

    def flush_cache(self) -> None:
        self._process.flush_cache()

    def status(self) -> dict[str, Any]:
        """What `op=status` answers and sessions hear once a second."""
        return {
            "protocol": VERSION,
            "version": __version__,
            "model": self._model,
            "policy": self._settings.policy,
            "aliases": self._settings.served_names[1:],
            "up": self._process.up,
            "draining": self._pump.draining,
            "sessions": len(self._ledger.sessions()),
            "unfinished": len(self._ledger),
            **self._process.describe(),
        }

    def _admit(
        self,
        key: Key,
        prompt: Ids,
        sampling: dict[str, Any],
        outlet: Outlet,
        keep_ids: bool,
    ) -> tuple[Request, TextStream]:
        """Checks one request and enters it in the ledger. Raises a TridentError."""
        if self._ledger.find(key) is not None:
            raise InvalidRequest(f"The uid {key[1]} is in use.", param="uid")
        if self._pump.draining:
            raise EngineDown("The server is shutting down.", code="draining")
        if self._ledger.take_early_abort(key):
            raise InvalidRequest("The request was aborted before it arrived.", code="aborted")
        if not isinstance(sampling, dict):
            raise InvalidRequest("sampling must be a JSON object.", param="sampling")
        params = SamplingParams.from_mapping(sampling)
        if self._settings.runner == "simulated":
            check_simulated(params)
        if params.grammar is not None:
            self._process.check_grammar()
        check_priority(self._settings.policy, params.priority)
        limits = self._process.limits
        request = Request.build(
            next(self._numbers), prompt, params, limits, self._tokenizer.eos_token_ids, key[0]
        )
        self._check_load(limits, outlet, request.client if params.user else None)
        stream = TextStream(
            request.id,
            key[1],
            outlet,
            len(prompt),
            params,
            self._tokenizer.detokenizer(params.skip_special_tokens),
            arrived=time.monotonic(),
            keep_ids=keep_ids,
            echo=prompt.tolist() if params.echo else (),
            log=TokenLog.of(params, prompt, self._tokenizer.texts),
        )
        self._ledger.enter(key, stream, request.client)
        return request, stream

    def _check_load(self, limits: Limits, outlet: Outlet, user: str | None) -> None:
        """Raises Overloaded when there is no place for one more; `user`: as the ledger knows it."""
        limits.check_queue(len(self._ledger))
        places = limits.max_running + limits.max_queue
        if isinstance(outlet, Session):
            share = max(int(self._settings.session_share * places), 1)
            if len(outlet.streams) >= share < places:
                raise Overloaded(f"This session has its share of requests: {share}.")
        share = max(int(self._settings.user_share * places), 1)
        if user is not None and self._ledger.held_by(user) >= share < places:
            raise Overloaded(f"This user has their share of requests: {share}.")
        most = self._settings.max_queued_tokens
        if most:
            queued = sum(s.prompt_tokens for s in self._ledger.streams() if not s.started)
            if queued >= most:
                raise Overloaded(f"The queue is full: {queued} prompt tokens wait.")
