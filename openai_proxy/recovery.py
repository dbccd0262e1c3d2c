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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from openai_proxy.sharedmemory import SHM
from openai_proxy.tritonadmin import AdminError, TritonAdmin
from openai_proxy.tritonserver import STUB

ATTEMPTS = 3
LOAD_TIMEOUT = 600.0


class Stub(NamedTuple):
    """A living stub: its model, and its shared memory's name in /dev/shm."""

    model: str
    region: str


def read_stub(process: psutil.Process) -> Stub | None:
    """None for a process that is no stub. A stub's command line begins:

    .../triton_python_backend_stub <repository>/<model>/<version>/model.py <region> ...
    """
    try:
        argv = process.cmdline()
    except psutil.Error:
        return None
    if len(argv) < 3 or not argv[0].endswith(STUB):
        return None
    return Stub(Path(argv[1]).parent.parent.name, argv[2])


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
        self._regions: set[str] = set()
        self._expected: Counter[str] = Counter()
        self._worker: threading.Thread | None = None
        self._repaired = ""
        self.failure = ""

    def missing(self, processes: Sequence[psutil.Process]) -> list[str]:
        """Models with fewer living stubs than they had. `processes`: the server's offspring."""
        counts = self._count(processes)
        self._expected |= counts
        return sorted(m for m, n in self._expected.items() if counts[m] < n)

    def look(self, processes: Sequence[psutil.Process]) -> None:
        """Call about once a second while the server should be healthy; never blocks for long."""
        missing = self.missing(processes)
        if self._worker is not None and self._worker.is_alive():
            return
        if self._worker is not None:
            self._worker = None
            self._expected[self._repaired] = 1  # one at least, though it may have died again
            missing = self.missing(processes)
        if missing and not self.failure:
            self._start(missing[0])

    def note(self, processes: Sequence[psutil.Process]) -> None:
        """Takes note of the stubs among the server's offspring, before they are killed."""
        self._count(processes)

    def remove_regions(self) -> None:
        """Removes the shared memory of all stubs seen, once no process of the server is left.

        A server that ends in good order has removed it; one that was killed has not.
        """
        for region in self._regions:
            SHM.joinpath(region).unlink(missing_ok=True)

    def _count(self, processes: Sequence[psutil.Process]) -> Counter[str]:
        # Read anew each time: just after its fork a stub still has its parent's command line.
        living = [stub for process in processes if (stub := read_stub(process)) is not None]
        self._regions.update(stub.region for stub in living)
        return Counter(stub.model for stub in living)

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
