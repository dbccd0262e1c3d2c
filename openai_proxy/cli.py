"""The `tridentlm` command. Every command imports what it needs only when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tridentlm import __version__
from tridentlm.errors import TridentError

app = typer.Typer(
    name="tridentlm",
    help="Large language models served as a Triton model repository.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Console entry point: an error of ours is one line on stderr and exit code 1."""
    try:
        app()
    except TridentError as error:
        typer.secho(f"tridentlm: {error.message}", fg="red", err=True)
        raise SystemExit(1) from None


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
def repository(
    directory: Annotated[Path, typer.Argument(help="New or empty folder.")],
    model: Annotated[str, typer.Option(help="Model of the engine, as for `serve`.")] = "",
) -> None:
    """Write the Triton model repository to DIRECTORY."""
    from openai_proxy.repository import write_repository

    typer.echo(write_repository(directory, model))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


if __name__ == "__main__":
    main()
