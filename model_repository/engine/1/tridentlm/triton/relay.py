"""The `relay` model: passes a plain client's responses on, and notices when nobody listens.

No Triton release tells a composing model that its ensemble's client has gone; only steps scheduled
after the cancellation see it. So this step looks at every response, and aborts the request in the
engine. The engine's heartbeats, sent while a request has no output, end here.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tridentlm.protocol import HEARTBEAT, RELAY_REPORT, Op
from tridentlm.startup import settle
from tridentlm.triton import tensors
from tridentlm.triton.bls import Calls
from tridentlm.triton.watchdog import exit_with_server

OUTPUTS = ("text_output", "token_ids", "logprobs", "finish_reason", "usage", "error")
REMEMBERED_ABORTS = 4096


class TritonPythonModel:
    """Decoupled, one instance: order within a request is kept by there being one."""

    def initialize(self, args: dict[str, str]) -> None:
        exit_with_server()
        tensors.check_package_version(Path(args["model_repository"]) / args["model_version"] / "x")
        self._engine = tensors.config_parameters(args).get("engine", "engine")
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._passed = 0
        self._calls: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_calls, name="calls", daemon=True)
        self._thread.start()
        settle()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = tensors.Responder(request)
            try:
                self._pass_on(request, responder)
            finally:
                responder.finish()
            self._passed += 1
            if self._passed == RELAY_REPORT:
                self._passed = 0
                self._calls.put((Op.PASSED, ""))

    def finalize(self) -> None:
        self._calls.put(None)
        self._thread.join(timeout=2)

    def _pass_on(self, request: Any, responder: tensors.Responder) -> None:
        finish = tensors.string(request, "finish_reason") or ""
        if finish in ("", HEARTBEAT):
            uid = tensors.string(request, "relay") or ""
            if uid not in self._aborted and responder.is_cancelled():
                self._abort(uid)
        if finish == HEARTBEAT:
            return
        outputs = [
            pb_utils.Tensor(name, tensor.as_numpy())
            for name in OUTPUTS
            if (tensor := pb_utils.get_input_tensor_by_name(request, name)) is not None
        ]
        responder.send(outputs, final=True)

    def _abort(self, uid: str) -> None:
        self._aborted[uid] = None
        if len(self._aborted) > REMEMBERED_ABORTS:
            self._aborted.popitem(last=False)
        self._calls.put((Op.ABORT, uid))

    def _run_calls(self) -> None:
        """Off the execute thread: a call into the engine must not hold up other clients."""
        calls = Calls()
        while (call := self._calls.get()) is not None:
            op, uid = call
            request = pb_utils.InferenceRequest(
                model_name=self._engine,
                requested_output_names=["frame"],
                inputs=[
                    tensors.text_tensor("op", op),
                    pb_utils.Tensor("uid", np.array([uid], dtype=object)),
                ],
            )
            for message in calls.run(request):
                pb_utils.Logger.log_warn(f"{op} {uid}: {message}")
