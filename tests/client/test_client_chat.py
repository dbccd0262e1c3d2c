from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fake_triton import FakeTriton
from test_client_api import serving

from tests.waiting import PATIENCE, wait_until
from tridentlm_client import ContextLengthExceeded

SCRIPT = """
import sys
from tridentlm_client.chat import run_chat
sys.exit(run_chat(sys.argv[1], sampling={"max_tokens": 64}, timeout=float(sys.argv[2])))
"""

PROMPT = "\x1b[?2004h"  # what prompt_toolkit turns on while it reads a line
TERMINAL_SCRIPT = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)" + SCRIPT


def talk(body: Any) -> list[str]:
    """Tells what the model sees: each message as role:content."""
    if body["messages"][-1]["content"] == "forever":
        return ["on "] * 100_000
    return [f"{m['role'][0]}:{m['content']} " for m in body["messages"]]


def command(script: str, port: int, timeout: float = PATIENCE) -> list[str]:
    return [sys.executable, "-c", script, f"localhost:{port}", str(timeout)]


def piped(port: int, lines: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(SCRIPT, port, timeout),
        input=lines,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )


@contextmanager
def chatting(port: int, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command(SCRIPT, port), text=True, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_piped_chat_keeps_its_history_and_knows_its_commands() -> None:
    with serving() as server:
        server.answer = talk
        lines = "one\n\ntwo\n/reset\nthree\n/system Be brief\nfour\n/help\n/what\n/exit\nfive\n"
        done = piped(server.port, lines)
        assert done.returncode == 0, done.stderr
        out = done.stdout
        assert "u:one a:u:one  u:two" in out
        assert "\nu:three" in out
        assert "s:Be brief u:four" in out
        assert "/reset         forget" in out
        assert "There is no command /what" in out
        assert "five" not in out
        assert len(server.ops("submit")) == 4
        assert len(server.ops("close")) == 1
        assert done.stderr == ""


def test_the_end_of_the_input_ends_the_chat_and_errors_do_not() -> None:
    with serving() as server:
        server.answer = talk

        def accept(uid: str, body: Any) -> dict[str, Any]:
            if body["messages"][-1]["content"] == "too long":
                return {"uid": uid, "error": ContextLengthExceeded("No [room].").payload()}
            return {"uid": uid, "prompt_tokens": 1}

        server.accept = accept
        done = piped(server.port, "too long\nshort")
        assert done.returncode == 0, done.stderr
        assert "No [room]." in done.stdout
        assert "\nu:short" in done.stdout


def test_an_interrupt_aborts_the_answer_and_keeps_the_chat() -> None:
    with serving() as server:
        server.answer = talk
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with chatting(server.port, **pipes) as process:
            assert process.stdin is not None
            process.stdin.write("forever\n")
            process.stdin.flush()
            assert process.stdout is not None
            Terminal(process.stdout.fileno()).wait_for("on on on")
            process.send_signal(signal.SIGINT)
            wait_until(lambda: server.session.aborted)
            out, err = process.communicate("next\n", timeout=PATIENCE)
            assert process.returncode == 0, err
            assert "[stopped]" in out
            assert "u:forever a:on on" in out
            assert "u:next" in out


def test_without_a_server_the_chat_says_so_and_fails() -> None:
    with serving() as server:
        port = server.port
    done = piped(port, "hi\n", timeout=2)
    assert done.returncode == 1
    assert "connection to Triton failed" in done.stdout


def test_at_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves() -> None:
    with serving() as server:
        server.answer = talk
        master, slave = pty.openpty()
        environment = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
        process = subprocess.Popen(
            command(TERMINAL_SCRIPT, server.port),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment,
        )
        os.close(slave)
        shown = Terminal(master)
        try:
            shown.wait_for(PROMPT)
            os.write(master, b"forever\r")
            shown.wait_for("on on on")
            os.write(master, b"\x03")
            shown.wait_for("[stopped]")
            wait_until(lambda: server.session.aborted)
            shown.wait_for(PROMPT)
            os.write(master, b"half a line\x03")
            shown.wait_for(PROMPT)
            os.write(master, b"again\r")
            shown.wait_for("u:again")
            shown.wait_for("tokens/s")
            shown.wait_for(PROMPT)
            os.write(master, b"\x04")
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
            os.close(master)


class Terminal:
    """What a process shows; `wait_for` looks only at what came after the last match."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._text = ""

    def wait_for(self, words: str) -> None:
        def seen() -> bool:
            with suppress(OSError):
                self._text += os.read(self._descriptor, 1 << 16).decode(errors="replace")
            return words in self._text

        try:
            wait_until(seen)
        except AssertionError:
            raise AssertionError(f"{words!r} was not shown: {self._text!r}") from None
        self._text = self._text.partition(words)[2]


def test_an_abandoned_chat_leaves_no_session_behind() -> None:
    async def body() -> None:
        server = FakeTriton()
        server.answer = talk
        await server.start()
        process = await asyncio.create_subprocess_exec(
            *command(SCRIPT, server.port), stdin=asyncio.subprocess.PIPE
        )
        try:
            while not server.sessions:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), PATIENCE) == 130
            assert len(server.ops("close")) == 1
        finally:
            if process.returncode is None:
                process.kill()
            await server.stop()

    asyncio.run(body())
