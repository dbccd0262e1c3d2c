"""The `engine` model: Triton's requests -> the broker, and its answers back.

The stub that runs this only speaks Triton and turns tokens into text. Scheduler and model run in a
child process (`tridentlm.worker`), so Triton's I/O never waits for them nor they for it.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import triton_python_backend_utils as pb_utils

from tridentlm.errors import InvalidRequest, TridentError
from tridentlm.protocol import HEARTBEAT, RELAY_REPORT, VERSION, Op
from tridentlm.startup import settle
from tridentlm.triton import tensors
from tridentlm.triton.bls import Calls
from tridentlm.triton.tokenizer import read_options
from tridentlm.triton.watchdog import exit_with_server

SWITCH_INTERVAL = 1e-4
PROBE_SECONDS = 0.5
NO_IDS = np.zeros(0, np.int32)


class FrameResponder(tensors.Responder):
    def send_frame(self, frame: bytes) -> None:
        self.send([tensors.text_tensor("frame", frame)])

    def answer(self, body: Any) -> None:
        """The one and last response of a control request."""
        self.send([tensors.text_tensor("frame", orjson.dumps(body))], final=True)


class OutputResponder(tensors.Responder):
    def send_output(
        self,
        text: str,
        ids: list[int],
        told: dict[str, list[Any]],
        end: dict[str, Any] | None,
        relay: str | None,
    ) -> None:
        reason = "" if end is None else end["finish_reason"]
        outputs = _outputs(text, ids, reason, relay)
        if told:
            outputs.append(tensors.text_tensor("logprobs", orjson.dumps(told)))
        if end is not None:
            outputs.append(tensors.text_tensor("usage", orjson.dumps(end["usage"])))
            if "error" in end:
                outputs.append(tensors.text_tensor("error", orjson.dumps(end["error"])))
        self.send(outputs, final=end is not None)

    def send_heartbeat(self, relay: str) -> None:
        self.send(_outputs("", [], HEARTBEAT, relay))


def _outputs(text: str, ids: list[int], reason: str, relay: str | None) -> list[Any]:
    outputs = [
        tensors.text_tensor("text_output", text.encode()),
        pb_utils.Tensor("token_ids", np.array(ids, np.int32) if ids else NO_IDS),
        tensors.text_tensor("finish_reason", reason),
    ]
    if relay is not None:
        outputs.append(tensors.text_tensor("relay", relay))
    return outputs


class TritonPythonModel:
    """Decoupled. READY means: the engine process has loaded and takes requests."""

    def initialize(self, args: dict[str, str]) -> None:
        from tridentlm.config import resolve_settings
        from tridentlm.hub import resolve_model
        from tridentlm.parallel.check import check_ranks
        from tridentlm.text import Tokenizer
        from tridentlm.triton.broker import Broker
        from tridentlm.triton.metrics import Metrics
        from tridentlm.triton.process import EngineProcess

        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="tridentlm: %(message)s")
        sys.setswitchinterval(SWITCH_INTERVAL)
        exit_with_server()
        tensors.check_package_version(Path(args["model_repository"]) / args["model_version"] / "x")
        self._name = args["model_name"]
        try:
            settings = resolve_settings(tensors.config_parameters(args))
            files = resolve_model(settings)
            check_ranks(settings, files)
            metrics = Metrics({"model": files.name, "engine": self._name})
            process = EngineProcess(settings, metrics.restarted)
            self._broker = Broker(settings, files.name, Tokenizer.load(files), process, metrics)
            self._broker.start()
        except TridentError as error:
            raise pb_utils.TritonModelException(error.message) from error
        settle()
        self._calls = Calls()
        self._stop = threading.Event()
        self._prober = threading.Thread(target=self._probe, name="probe", daemon=True)
        self._prober.start()

    def is_ready(self) -> bool:
        """Asked by Triton from 26.03 on."""
        return bool(self._broker.status()["up"])

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder: tensors.Responder | None = None
            try:
                op = tensors.string(request, "op") or Op.GENERATE
                if op in (Op.GENERATE, Op.RELAYED):
                    responder = output = OutputResponder(request)
                    self._generate(request, op, output)
                else:
                    responder = frames = FrameResponder(request)
                    self._control(request, op, frames)
            except Exception as error:
                if not isinstance(error, TridentError):
                    logging.exception("a request failed")
                responder = responder or tensors.Responder(request)
                responder.fail(tensors.as_trident_error(error))

    def finalize(self) -> None:
        self._stop.set()
        self._prober.join(timeout=2)
        self._broker.close()
        del self._broker
        gc.collect()  # senders left in cycles must go before the stub unmaps their memory

    def _generate(self, request: Any, op: str, responder: OutputResponder) -> None:
        ids = tensors.array(request, "input_ids")
        if ids is None:
            raise InvalidRequest("input_ids is missing.", param="input_ids")
        if op == Op.RELAYED:
            sampling = tensors.json_object(tensors.string(request, "sampling") or "{}", "sampling")
            stream_input = tensors.array(request, "stream")
            streaming = True if stream_input is None else bool(stream_input[0])
        else:
            options = read_options(request)
            sampling, streaming = options["sampling"], bool(options["stream"])
        self._broker.generate(
            ids, sampling, responder, streaming=streaming, relayed=op == Op.RELAYED
        )

    def _control(self, request: Any, op: str, responder: FrameResponder) -> None:
        parameters = tensors.parameters(request)
        session = str(parameters.get("session", ""))
        broker = self._broker
        if op == Op.SUBMIT:
            ids = tensors.array(request, "input_ids")
            entries = orjson.loads(tensors.string(request, "sampling") or "[]")
            responder.answer(broker.submit(session, entries, NO_IDS if ids is None else ids))
        elif op == Op.ACK:
            broker.acknowledge(session, int(parameters.get("seq", 0)))
            responder.finish()
        elif op == Op.ABORT:
            broker.abort(session, tensors.strings(request, "uid") or [])
            responder.finish()
        elif op == Op.PASSED:
            broker.passed(RELAY_REPORT)
            responder.finish()
        elif op == Op.SESSION:
            if parameters.get("protocol") != VERSION or len(session) != 32:
                raise InvalidRequest(
                    f"A session needs a 32-character id and protocol {VERSION}.", param="session"
                )
            broker.open_session(session, responder)
        elif op == Op.STATUS:
            responder.answer(broker.status())
        elif op in (Op.CLOSE, Op.DRAIN, Op.FLUSH_CACHE):
            if op == Op.CLOSE:
                broker.close_session(session)
            elif op == Op.DRAIN:
                broker.drain()
            else:
                broker.flush_cache()
            responder.answer({"ok": True})
        else:
            raise InvalidRequest(f"Unknown op: {op}.", param="op")

    def _probe(self) -> None:
        """Drains once Triton no longer routes to this model: nobody tells it that it must end.

        `finalize` waits for open requests, so open sessions would hold up the server's exit.
        A server that still loads other models refuses too: only a refusal after a success counts.
        """
        served = False
        while not self._stop.wait(PROBE_SECONDS):
            refused = self._refused()
            served = served or not refused
            if refused and served:
                logging.info("the server is stopping or unloading %s: draining", self._name)
                self._broker.drain()
                return

    def _refused(self) -> bool:
        try:
            call = pb_utils.InferenceRequest(
                model_name=self._name,
                requested_output_names=["frame"],
                inputs=[tensors.text_tensor("op", Op.STATUS)],
            )
            return bool(self._calls.run(call))
        except Exception:
            return True
