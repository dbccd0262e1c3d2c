"""A chat in the terminal, straight to Triton. Without a terminal it reads lines from stdin."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prompt_toolkit import PromptSession
from rich.console import Console

from tridentlm.errors import TridentError
from tridentlm_client.session import Session
from tridentlm_client.stream import Stream, Submission
from tridentlm_client.wire import TlsOptions

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message (without TEXT: remove it) and forget the conversation
/help          show this
/exit          leave; Ctrl-D does too
Ctrl-C stops the answer."""

ReadLine = Callable[[], Awaitable[str]]


def run_chat(
    target: str,
    *,
    system: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    engine: str = "engine",
    submit: str = "submit",
    tls: TlsOptions | None = None,
    timeout: float = 60.0,
) -> int:
    """Chats with the model at `target` until the user leaves.

    `sampling` holds fields of `SamplingParams`. Returns the process's exit code: 0, 1 when the
    server could not be reached within `timeout` seconds, or 130 when interrupted between answers.
    """
    try:
        return asyncio.run(
            _chat(Session(target, engine=engine, submit=submit, tls=tls), system, sampling, timeout)
        )
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


async def _chat(
    session: Session, system: str | None, sampling: Mapping[str, Any] | None, timeout: float
) -> int:
    console = Console(highlight=False, soft_wrap=True)
    _interrupt_cancels(asyncio.current_task())
    try:
        waiting = f"Connecting to {session.target}, for {timeout:.0f} s at most; Ctrl-C leaves ..."
        with console.status(waiting):
            await session.start(timeout)
        model = (session.status or {}).get("model", "")
        console.print(f"Model {model} at {session.target}. /help shows the commands.", style="dim")
        await Chat(session, console, system, sampling or {}).run(line_reader())
        return 0
    except TridentError as error:
        console.print(error.message, style="red", markup=False)
        return 1
    finally:
        await session.close()


def _interrupt_cancels(task: asyncio.Task[Any] | None) -> None:
    """Ctrl-C then runs what is in `finally`; by itself asyncio does so from Python 3.11 on only."""
    assert task is not None, "called from a coroutine"
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)


class Chat:
    """The conversation and its commands."""

    def __init__(
        self, session: Session, console: Console, system: str | None, sampling: Mapping[str, Any]
    ) -> None:
        self._session = session
        self._console = console
        self._system = system
        self._sampling = sampling
        self._messages: list[dict[str, str]] = []
        self._reset()

    async def run(self, read_line: ReadLine) -> None:
        """Reads and answers until /exit or the end of the input."""
        while True:
            try:
                line = (await read_line()).strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                await self._turn(line)

    def _command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        if name == "/reset":
            self._reset()
            self._say("The conversation is forgotten.")
        elif name == "/system":
            self._system = text.strip() or None
            self._reset()
            self._say("The system message is set." if self._system else "No system message.")
        elif name == "/help":
            self._say(HELP)
        else:
            self._say(f"There is no command {name}; /help shows them.")

    def _reset(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def _say(self, text: str, style: str = "dim") -> None:
        self._console.print(text, style=style, markup=False)

    async def _turn(self, line: str) -> None:
        """One question and its answer. Ctrl-C stops the answer; what was said of it counts."""
        asked = len(self._messages)
        self._messages.append({"role": "user", "content": line})
        parts: list[str] = []
        answer = asyncio.get_running_loop().create_task(self._answer(parts))
        _interrupt_cancels(answer)
        try:
            await answer
        except asyncio.CancelledError:
            self._say("\n[stopped]")
        except TridentError as error:
            self._say(error.message, "red")
            parts = []
        finally:
            _interrupt_cancels(asyncio.current_task())
        if parts:
            self._messages.append({"role": "assistant", "content": "".join(parts)})
        else:
            del self._messages[asked:]

    async def _answer(self, parts: list[str]) -> None:
        submission = Submission(messages=self._messages, sampling=self._sampling)
        [outcome] = await self._session.submit([submission])
        if isinstance(outcome, TridentError):
            raise outcome
        started, tokens = time.monotonic(), 0
        async with outcome:
            async for delta in outcome:
                parts.append(delta.text)
                tokens += delta.count
                self._console.print(delta.text, end="", markup=False)
        self._console.print()
        self._note(outcome, tokens, time.monotonic() - started)

    def _note(self, stream: Stream, tokens: int, seconds: float) -> None:
        if stream.end is not None and stream.end.finish_reason == "length":
            self._say("[cut: the limit of tokens is reached]")
        if self._console.is_terminal and seconds > 0:
            self._say(f"{tokens} tokens, {tokens / seconds:.1f} tokens/s")


def line_reader() -> ReadLine:
    """Reads a line: with editing and history at a terminal, plain otherwise.

    The reader raises EOFError at the end of the input.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        prompt: PromptSession[str] = PromptSession("> ")
        return prompt.prompt_async
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def feed() -> None:
        # Unbuffered and in a daemon thread: a read that waits for ever must not hold up the exit.
        with open(os.dup(sys.stdin.fileno()), "rb", buffering=0) as stdin:
            while line := stdin.readline():
                loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, b"")

    async def read_line() -> str:
        line = await lines.get()
        if not line:
            raise EOFError
        return line.decode(errors="replace")

    threading.Thread(target=feed, daemon=True).start()
    return read_line
