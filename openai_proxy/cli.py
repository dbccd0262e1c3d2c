"""The `tridentlm` command. Every command imports what it needs only when it runs."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from openai_proxy.options import (
    ALONE_HELP,
    CONNECTION_HELP,
    ENGINE_HELP,
    MODEL_FLAGS,
    PROXY_HELP,
    chosen,
    model_choices,
    with_flags,
)
from openai_proxy.settings import ProxySettings
from tridentlm import __version__
from tridentlm.config import PREFIX, EngineSettings, resolve_settings
from tridentlm.errors import InvalidRequest, TridentError

app = typer.Typer(
    name="tridentlm",
    help="Large language models served as a Triton model repository.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Console entry point: an error of ours, or of the system, is a line and exit code 1."""
    try:
        app()
    except (TridentError, OSError) as error:
        message = error.message if isinstance(error, TridentError) else str(error)
        typer.secho(f"tridentlm: {message}", fg="red", err=True)
        raise SystemExit(1) from None


def say(line: str) -> None:
    typer.echo(line, err=True)


@app.command()
@with_flags(("Engine", EngineSettings, ENGINE_HELP), ("OpenAI API", ProxySettings, PROXY_HELP))
def serve(
    http_port: Annotated[int, typer.Option(help="Port of Triton's HTTP API.")] = 8100,
    grpc_port: Annotated[int, typer.Option(help="Port of Triton's gRPC API.")] = 8101,
    metrics_port: Annotated[int, typer.Option(help="Port of Triton's metrics.")] = 8102,
    triton_host: Annotated[str, typer.Option(help="Address of Triton's ports.")] = "127.0.0.1",
    repository: Annotated[
        Path | None, typer.Option(help="Model repository; default: this installation's own.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show all of Triton's log.")] = False,
    **flags: Any,
) -> None:
    """Serve a model, or several: Triton and the OpenAI API, until SIGTERM or Ctrl-C."""
    from openai_proxy.launcher import Launcher
    from openai_proxy.launchplan import ServeOptions, check_several
    from openai_proxy.repository import engine_configs, ensembles, ready_repository
    from tridentlm.hub import resolve_model
    from tridentlm.parallel.check import check_ranks

    engine = chosen(EngineSettings, flags)
    models = model_choices(engine)
    if len(models) == 1:
        engine |= {name: value for name, value in asdict(models[0]).items() if value}
    elif repository is not None:
        raise InvalidRequest("--repository names its models itself.", param="model")
    folder = (repository or ready_repository(models)).resolve()
    environ = {PREFIX + "PORT": "8000", **os.environ}
    environ.update({PREFIX + name.upper(): str(value) for name, value in engine.items()})
    settings = [resolve_settings(parameters, environ) for parameters in engine_configs(folder)]
    options = ServeOptions(
        environ=environ,
        proxy=ProxySettings.from_environment(environ, **chosen(ProxySettings, flags)),
        drain_seconds=max(each.drain_seconds for each in settings),
        ensembles=ensembles(folder),
        repository=folder,
        triton_host=triton_host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        verbose=verbose,
    )
    logging.getLogger("tridentlm").addHandler(logging.StreamHandler())
    logging.getLogger("tridentlm").setLevel(logging.INFO)
    names: list[str] = []
    for each in settings:
        files = resolve_model(each)
        check_ranks(each, files)
        names += (files.name, *each.served_names[1:])
        say(f"model: {', '.join((files.name, *each.served_names[1:]))} ({files.path})")
    check_several(settings, names)
    raise SystemExit(Launcher(options, say).run())


@app.command()
@with_flags(
    ("Triton", ProxySettings, CONNECTION_HELP),
    ("OpenAI API", ProxySettings, {**ALONE_HELP, **PROXY_HELP}),
)
def proxy(**flags: Any) -> None:
    """Run the OpenAI API alone, in front of a tritonserver that serves our repository."""
    from openai_proxy.serve import run_proxy

    raise SystemExit(run_proxy(ProxySettings.from_environment(**flags)))


@app.command()
@with_flags(("Triton", ProxySettings, CONNECTION_HELP))
def chat(
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus of the distribution.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answer.")] = None,
    **flags: Any,
) -> None:
    """Chat in the terminal, straight to Triton (default: that of `tridentlm serve`)."""
    from openai_proxy.sessions import tls_options
    from tridentlm_client.chat import run_chat

    environ = {PREFIX + "TRITON": "127.0.0.1:8101", **os.environ}
    settings = ProxySettings.from_environment(environ, **chosen(ProxySettings, flags))
    names = settings.engine_names()
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    sampling = {name: value for name, value in options.items() if value is not None}
    code = run_chat(
        settings.triton,
        system=system,
        sampling=sampling,
        engine=names.engine,
        submit=names.submit,
        tls=tls_options(settings),
    )
    raise SystemExit(code)


@app.command()
def bench(
    url: Annotated[str, typer.Option(help="Server to load.")] = "http://127.0.0.1:8000",
    streams: Annotated[int, typer.Option(min=1, help="Clients that start at once.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens for each client.")] = 64,
    runs: Annotated[int, typer.Option(min=1, help="Runs; every one is printed.")] = 3,
    model: Annotated[str, typer.Option(help="Model to ask; default: the only one.")] = "",
    api_key: Annotated[str, typer.Option(help="Key of the server.")] = "",
) -> None:
    """Stream chat completions to many clients at once; print one JSON object a run."""
    import asyncio
    import json

    from tridentlm_client.load import run_load

    for _ in range(runs):
        result = asyncio.run(run_load(url, streams, tokens, model=model, api_key=api_key))
        typer.echo(json.dumps(result.to_dict()))
        if result.failures:
            raise SystemExit(1)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A file of --record-failures.")],
    url: Annotated[str, typer.Option(help="Server to ask.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(envvar=PREFIX + "API_KEY", help="Its key.")] = "",
) -> None:
    """Send a recorded request again; exit code 1 when it fails again."""
    from openai_proxy.replay import run_replay

    raise SystemExit(run_replay(file, url, api_key, typer.echo))


@app.command(context_settings={"ignore_unknown_options": True})
def triton(
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of tritonserver.")] = None,
) -> None:
    """Run the tritonserver that was found: tridentlm triton -- --model-repository=DIR ..."""
    from openai_proxy.tritonserver import locate

    server = locate()
    command = server.command(args or [])
    os.execve(command[0], command, server.environ())


@app.command()
@with_flags(("Models", EngineSettings, {name: ENGINE_HELP[name] for name in MODEL_FLAGS}))
def repository(
    directory: Annotated[Path, typer.Argument(help="New or empty folder.")], **flags: Any
) -> None:
    """Write the Triton model repository to DIRECTORY, with an engine for every --model."""
    from openai_proxy.repository import write_repository

    typer.echo(write_repository(directory, model_choices(flags)))


@app.command()
def doctor(
    remove_regions: Annotated[
        bool,
        typer.Option(
            "--remove-regions", help="First remove shared memory that killed Tritons left behind."
        ),
    ] = False,
) -> None:
    """Say what is found here, what is missing and what to do about it."""
    from rich.console import Console

    from openai_proxy.doctor import run_doctor

    raise SystemExit(run_doctor(Console().print, remove_regions=remove_regions))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


if __name__ == "__main__":
    main()
