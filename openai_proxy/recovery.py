"""Brings a model back whose Python stub has died.

Triton 2.51 goes on calling such a model ready and lets its requests hang; no release starts the
stub again. In explicit mode an unload and a load do.

    stub gone --> index says READY? --> unload model --> load model --> load ensembles not READY
                       `-- no: somebody unloaded it on purpose; leave it
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from openai_proxy.tritonadmin import AdminError, TritonAdmin
from openai_proxy.tritonserver import STUB

ATTEMPTS = 3
LOAD_TIMEOUT = 600.0


def stub_models(processes: Iterable[psutil.Process], known: dict[int, str]) -> Counter[str]:
    """How many living stubs each model has. `known` caches {pid: model} ("": not a stub)."""
    counts: Counter[str] = Counter()
    living = set()
    for process in processes:
        living.add(process.pid)
        if process.pid not in known:
            known[process.pid] = _stub_model(process)
        if known[process.pid]:
            counts[known[process.pid]] += 1
    for pid in known.keys() - living:
        del known[pid]
    return counts


def _stub_model(process: psutil.Process) -> str:
    # Its command line: .../triton_python_backend_stub <repository>/<model>/<version>/model.py ...
    try:
        argv = process.cmdline()
    except psutil.Error:
        return ""
    if len(argv) < 2 or not argv[0].endswith(STUB):
        return ""
    return Path(argv[1]).parent.parent.name


class Recovery:
    """Compares the stubs with those of a healthy server; repairs one model at a time in a thread.

    `failure` is set, and stays, when a model could not be brought back.
    """

    def __init__(
        self, admin: TritonAdmin, ensembles: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self._admin = admin
        self._ensembles = ensembles
        self._say = say
        self._known: dict[int, str] = {}
        self._expected: Counter[str] = Counter()
        self._worker: threading.Thread | None = None
        self._repaired = ""
        self.failure = ""

    def missing(self, processes: Sequence[psutil.Process]) -> list[str]:
        """Models with fewer living stubs than they had. `processes`: the server's offspring."""
        counts = stub_models(processes, self._known)
        self._expected |= counts
        return sorted(m for m, n in self._expected.items() if counts[m] < n)

    def look(self, processes: Sequence[psutil.Process]) -> None:
        """Call about once a second while the server should be healthy; never blocks for long."""
        missing = self.missing(processes)
        if self._worker is not None and self._worker.is_alive():
            return
        if self._worker is not None:
            self._worker = None
            self._expected[self._repaired] = 0
            missing = self.missing(processes)
        if missing and not self.failure:
            self._start(missing[0])

    def _start(self, model: str) -> None:
        try:
            state = self._admin.states().get(model, "")
        except AdminError:
            return  # the server is going down or busy: looked at again in a second
        if state != "READY":
            self._expected.pop(model)
            return
        self._say(f"{model}: its Python stub died; loading the model again")
        self._repaired = model
        self._worker = threading.Thread(target=self._repair, args=(model,), daemon=True)
        self._worker.start()

    def _repair(self, model: str) -> None:
        began = time.monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._admin.unload(model)
                self._admin.load(model, LOAD_TIMEOUT)
                self._load_ensembles()
            except AdminError as error:
                self._say(f"{model}: attempt {attempt} of {ATTEMPTS} failed: {error.message}")
                time.sleep(attempt)
                continue
            self._say(f"{model}: back after {time.monotonic() - began:.1f} s")
            return
        self.failure = f"the model {model} could not be loaded again after its stub died"

    def _load_ensembles(self) -> None:
        states = self._admin.states()
        for name in self._ensembles:
            if states.get(name) != "READY":
                self._admin.load(name, LOAD_TIMEOUT)
