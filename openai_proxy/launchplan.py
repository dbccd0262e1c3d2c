"""What `tridentlm serve` is going to run: its options, the checks first, the children's input."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from openai_proxy.settings import PORTS, ProxySettings
from tridentlm.config import EngineSettings
from tridentlm.errors import InvalidRequest, TridentError

DRAIN_SLACK = 6.0  # what Triton needs beyond the requests: it looks once a second
NVIDIA_DEVICE = Path("/dev/nvidiactl")


class LaunchFailure(TridentError):
    """Why the service cannot start or go on; becomes exit code 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """`environ`: of both children. `ensembles`: the models of the repository to load.

    The proxy's `triton` and `triton_metrics` are made from the ports here.
    """

    environ: Mapping[str, str]
    proxy: ProxySettings
    drain_seconds: float
    ensembles: Sequence[str]
    repository: Path
    triton_host: str = "127.0.0.1"
    http_port: int = 8100
    grpc_port: int = 8101
    metrics_port: int = 8102
    verbose: bool = False


def check_several(settings: Sequence[EngineSettings], names: Sequence[str]) -> None:
    """Raises InvalidRequest when engines cannot share a GPU's memory, or have a name in common."""
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise InvalidRequest(
            f"Two models are called {', '.join(twins)}.", param="served_model_name"
        )
    if len(settings) < 2 or not NVIDIA_DEVICE.exists():
        return
    for each in settings:
        if each.device != "cpu" and not (each.num_pages or each.kv_memory_gb):
            raise InvalidRequest(
                "Several models on GPUs need --kv-memory-gb or --num-pages: one engine alone "
                "would take what is free.",
                param="kv_memory_gb",
            )


def claim_ports(options: ServeOptions) -> ExitStack:
    """Keeps other launchers from the ports until it is closed: theirs are bound only after a load.

    Raises LaunchFailure naming every port that is taken, given twice or none.
    """
    wanted = [
        ("--port", options.proxy.host, options.proxy.port),
        ("--http-port", options.triton_host, options.http_port),
        ("--grpc-port", options.triton_host, options.grpc_port),
        ("--metrics-port", options.triton_host, options.metrics_port),
    ]
    problems = []
    with ExitStack() as claims:
        for number, (flag, host, port) in enumerate(wanted):
            twin = next((other for other, _, taken in wanted[:number] if taken == port), None)
            if port not in PORTS:
                problems.append(f"{flag} must be in 1 to 65535, got {port}")
            elif twin:
                problems.append(f"{flag} and {twin} are both {port}")
            elif not port_is_free(host, port):
                problems.append(f"port {port} ({flag}) is in use")
            elif not _can_claim(claims.enter_context(socket.socket(socket.AF_UNIX)), host, port):
                problems.append(f"port {port} ({flag}) is of another `tridentlm serve`")
        if problems:
            raise LaunchFailure("; ".join(problems) + ".")
        return claims.pop_all()


def _can_claim(claim: socket.socket, host: str, port: int) -> bool:
    """Takes an abstract name, which has the scope of ports and goes with its process."""
    try:
        claim.bind(f"\0tridentlm serve {host}:{port}")
    except OSError:
        return False
    return True


def port_is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def triton_arguments(options: ServeOptions) -> list[str]:
    host = options.triton_host
    return [
        f"--model-repository={options.repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in options.ensembles),
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={math.ceil(options.drain_seconds + DRAIN_SLACK)}",
        f"--http-address={host}",
        f"--http-port={options.http_port}",
        f"--grpc-address={host}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-address={host}",
        f"--metrics-port={options.metrics_port}",
        "--grpc-keepalive-time=10000",
        "--grpc-keepalive-permit-without-calls=1",
        *(() if NVIDIA_DEVICE.exists() else ("--allow-gpu-metrics=false",)),
    ]


def proxy_environ(options: ServeOptions) -> dict[str, str]:
    """The proxy's settings as its environment, where a key is not seen in the process list."""
    host = url_host(reachable(options.triton_host))
    given = {
        **asdict(options.proxy),
        "triton": f"{host}:{options.grpc_port}",
        "triton_metrics": f"http://{host}:{options.metrics_port}/metrics",
    }
    return {
        f"TRIDENTLM_PROXY_{spec.name.upper()}": str(given[spec.name])
        for spec in fields(ProxySettings)
    }


def reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
