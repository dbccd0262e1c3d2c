"""`run_proxy`: the proxy as one process, or as N workers that share a listening socket.

    run_proxy --+-- workers == 1 -> uvicorn's server in this process
                +-- else         -> uvicorn's supervisor -> N x (worker_app: own loop, own session)

The supervisor starts a worker that died again. SIGTERM ends accepting, lets running requests finish
for `drain_seconds`, then closes the session, which aborts what is left.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from openai_proxy.httpserver import HttpProtocol
from openai_proxy.logs import configure_logging
from openai_proxy.settings import ProxySettings

log = logging.getLogger("openai_proxy")

_WORKER_VARIABLE = "TRIDENTLM_PROXY_WORKER_SETTINGS"
_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 4096


def run_proxy(settings: ProxySettings) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code: 1 when it could not start."""
    configure_logging(as_json=settings.log_json)
    os.environ[_WORKER_VARIABLE] = settings.to_json()
    config = server_config("openai_proxy.serve:worker_app", settings)
    try:
        listener = _listen(settings)
    except OSError as error:
        log.error("cannot listen on %s:%d: %s", settings.host, settings.port, error)
        return 1
    if settings.workers == 1:
        # The server raises the signal that ended it once more: not to be our exit status.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server = uvicorn.Server(config)
        server.run(sockets=[listener])
        return 0 if server.started else 1
    with tempfile.TemporaryDirectory(prefix="tridentlm-metrics-") as directory:
        os.environ[_METRICS_VARIABLE] = directory
        supervisor = Multiprocess(config, sockets=[listener])
        supervisor.run()
    return int(any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes))


def worker_app() -> FastAPI:
    """The application of one worker process; its settings come through the environment."""
    from openai_proxy.app import create_app

    settings = ProxySettings.from_json(os.environ[_WORKER_VARIABLE])
    configure_logging(as_json=settings.log_json)
    supervisor = multiprocessing.parent_process()
    if supervisor is not None:
        threading.Thread(target=_end_after, args=(supervisor,), daemon=True).start()
    return create_app(settings)


def _end_after(supervisor: Any) -> None:
    """Ends this worker when the supervisor was killed and cannot say so."""
    supervisor.join()
    os.kill(os.getpid(), signal.SIGTERM)


def server_config(app: FastAPI | str, settings: ProxySettings) -> uvicorn.Config:
    """The HTTP server for `app`, an application or where to find its factory."""
    return uvicorn.Config(
        app,
        factory=isinstance(app, str),
        workers=settings.workers,
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
    )


def _listen(settings: ProxySettings) -> socket.socket:
    """Raises OSError when the address is taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.create_server(
        (settings.host, settings.port), family=family, backlog=_BACKLOG, reuse_port=False
    )
    listener.set_inheritable(True)
    return listener
