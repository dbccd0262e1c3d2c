"""Finds a tritonserver and says how to run it with the Python backend of this interpreter.

    $TRITON_ROOT  ->  PATH  ->  /opt/tritonserver/bin  ->  the nvidia-pytriton wheel
    `-- wheel layout, unpacked          `-- NGC container       `-- extra "server"

A wheel's server is not a whole installation: it needs the libraries beside it and libpython on the
library path, and a backend directory with the stub of the running Python, which is put together in
the cache (symbolic links, or copies where the unpacked file lost its executable bit).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tridentlm.errors import TridentError
from tridentlm.hub import cache_dir

SYSTEM_BINARY = Path("/opt/tritonserver/bin/tritonserver")
LAST_NUMPY1_ONLY = (2, 52)  # 2.51: measured; 2.52: a known issue in its release notes
WHEEL_VERSIONS = {"0.7.0": "2.51.0"}
STUB = "triton_python_backend_stub"


class ServerNotFound(TridentError):
    """No tritonserver that can be run; the message says what to install."""


@dataclass(frozen=True, slots=True)
class TritonServer:
    """`version` is Triton's own ("2.51.0"), or "" where nothing tells it."""

    binary: Path
    origin: str
    version: str
    stub: Path
    library_path: tuple[str, ...] = ()
    arguments: tuple[str, ...] = field(default=())

    def command(self, args: Sequence[str] = ()) -> list[str]:
        """The argv that runs this server with `args`, which win over our own additions."""
        return [str(self.binary), *self.arguments, *args]

    def environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """`base` (default os.environ) with the library path and this interpreter first on PATH.

        The stub embeds Python and finds its packages from the first `python3` on PATH, so without
        this a server started from a virtual environment would not see its packages.
        """
        env = dict(os.environ if base is None else base)
        env["PATH"] = _join(os.path.dirname(sys.executable), env.get("PATH", os.defpath))
        if self.library_path:
            env["LD_LIBRARY_PATH"] = _join(*self.library_path, env.get("LD_LIBRARY_PATH", ""))
        return env

    @property
    def reads_numpy2(self) -> bool:
        """False for versions whose stub gets numpy 2 arrays with the right shape but no bytes."""
        parts = self.version.split(".")[:2]
        if len(parts) < 2 or not all(p.isdigit() for p in parts):
            return True
        return (int(parts[0]), int(parts[1])) > LAST_NUMPY1_ONLY


def locate(environ: Mapping[str, str] | None = None) -> TritonServer:
    """Raises ServerNotFound with what to do when there is none for this Python."""
    env = os.environ if environ is None else environ
    if env.get("TRITON_ROOT"):
        root = Path(env["TRITON_ROOT"])
        return _bundled(root / "pytriton" / "tritonserver", "TRITON_ROOT")
    on_path = shutil.which("tritonserver", path=env.get("PATH"))
    if on_path:
        return _installed(Path(on_path).resolve(), "PATH", env)
    if SYSTEM_BINARY.exists():
        return _installed(SYSTEM_BINARY, "system", env)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ServerNotFound(
            "No tritonserver on PATH or in /opt/tritonserver. Install the one that PyPI has "
            "(Linux, x86-64): pip install 'tridentlm[server]'"
        )
    return _bundled(Path(spec.submodule_search_locations[0]) / "tritonserver", "wheel")


def numpy_problem(server: TritonServer) -> str:
    """Why the installed numpy cannot work with `server`, or "" when it can."""
    version = importlib.metadata.version("numpy")
    if server.reads_numpy2 or int(version.split(".")[0]) < 2:
        return ""
    return (
        f"numpy {version} with Triton {server.version}: its Python backend reads arrays of numpy 2 "
        "as empty. Do: pip install 'numpy<2'"
    )


def stub_problem(server: TritonServer) -> str:
    """Runs the Python backend's stub without arguments: "" when it gets as far as its own usage."""
    try:
        done = subprocess.run(
            [str(server.stub)], env=server.environ(), capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{server.stub} does not run: {error}"
    if "error while loading shared libraries" in done.stderr:
        return done.stderr.strip().removeprefix(f"{server.stub}: ")
    return ""


def libpython() -> Path | None:
    """The shared library of this interpreter that the stub loads, or None when there is none."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    places = [
        sysconfig.get_config_var("LIBDIR") or "",
        os.path.join(sys.base_prefix, "lib"),
        os.path.join("/usr/lib", multiarch),
        "/usr/lib64",
    ]
    return next((Path(p, name) for p in places if p and Path(p, name).exists()), None)


def _installed(binary: Path, origin: str, env: Mapping[str, str]) -> TritonServer:
    home = binary.parent.parent
    stub = home / "backends" / "python" / STUB
    version = env.get("TRITON_SERVER_VERSION", "")
    if (home / "TRITON_VERSION").exists():
        version = (home / "TRITON_VERSION").read_text().strip()
    arguments: tuple[str, ...] = ()
    if home != SYSTEM_BINARY.parent.parent and stub.exists():
        arguments = (f"--backend-directory={home / 'backends'}",)
    return TritonServer(binary, origin, version, stub, arguments=arguments)


def _bundled(root: Path, origin: str) -> TritonServer:
    binary = root / "bin" / "tritonserver"
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / minor / STUB
    if not binary.exists():
        raise ServerNotFound(f"No tritonserver in {root} ({origin}).")
    if not stub.exists():
        raise ServerNotFound(
            f"The tritonserver in {root} has no Python backend stub for Python {minor}. "
            "Use a Python from 3.10 to 3.13."
        )
    key = hashlib.sha256(f"{root.resolve()} {binary.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    home = cache_dir() / "triton" / f"{key}-py{minor}"
    backend = home / "backends" / "python"
    for source in sorted((root / "backends" / "python").iterdir()):
        if source.is_file():
            _place(source, backend / source.name, executable=False)
    _place(stub, backend / STUB, executable=True)
    _place(binary, home / "bin" / "tritonserver", executable=True)
    shared = libpython()
    libraries = [str(root.parent.parent / "nvidia_pytriton.libs")]
    if shared is not None:
        libraries.append(str(shared.parent))
    return TritonServer(
        binary=home / "bin" / "tritonserver",
        origin=origin,
        version=_wheel_version(),
        stub=backend / STUB,
        library_path=tuple(libraries),
        arguments=(f"--backend-directory={home / 'backends'}",),
    )


def _place(source: Path, target: Path, *, executable: bool) -> None:
    """Makes `target` a link to `source`, or an executable copy where `source` may not be run.

    Renamed into its place, so that two starts at once never see half a file.
    """
    copy = executable and not os.access(source, os.X_OK)
    if target.exists() and (copy or target.resolve() == source.resolve()):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch, target.name)
        if copy:
            shutil.copyfile(source, made)
            made.chmod(made.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        else:
            made.symlink_to(source.resolve())
        made.replace(target)


def _wheel_version() -> str:
    try:
        release = importlib.metadata.version("nvidia-pytriton")
    except importlib.metadata.PackageNotFoundError:
        release = "0.7.0"  # an unpacked wheel has no metadata; this is the one we ask for
    return WHEEL_VERSIONS.get(release, "")


def _join(*paths: str) -> str:
    return os.pathsep.join(dict.fromkeys(p for p in os.pathsep.join(paths).split(os.pathsep) if p))
