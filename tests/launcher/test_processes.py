from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from openai_proxy.processes import Family, is_alive
from tests.waiting import PATIENCE, wait_until, wait_until_gone

# A parent, a child in its session, and a grandchild that starts a session of its own.
TREE = """
import subprocess, sys, time
sleep = "import time; time.sleep(1000)"
away = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}], "
away += "start_new_session=True); print('away', flush=True); " + sleep
subprocess.Popen([sys.executable, "-c", sleep])
subprocess.Popen([sys.executable, "-c", away])
print("here", flush=True)
time.sleep(1000)
"""


@contextmanager
def family(source: str) -> Iterator[tuple[Family, list[str]]]:
    lines: list[str] = []
    made = Family("test", [sys.executable, "-c", source], os.environ, lines.append)
    try:
        yield made, lines
    finally:
        made.kill()


def test_kill_ends_the_whole_tree_and_a_session_that_left_it() -> None:
    with family(TREE) as (tree, lines):
        wait_until(lambda: set(lines) == {"here", "away"}, PATIENCE, "the tree stands")
        wait_until(lambda: len(tree.observe()) == 3, PATIENCE, "three descendants")
        descendants = tree.observe()
        assert tree.kill() == []
        assert [p for p in descendants if is_alive(p)] == []
        assert tree.exit_code() == -signal.SIGKILL


def test_kill_finds_those_whose_parent_was_killed_before() -> None:
    with family(TREE) as (tree, _):
        wait_until(lambda: len(tree.observe()) == 3, PATIENCE, "three descendants")
        descendants = tree.observe()
        os.kill(tree.pid, signal.SIGKILL)
        wait_until(lambda: tree.exit_code() is not None, PATIENCE, "the child is gone")
        assert len([p for p in descendants if is_alive(p)]) == 3
        assert tree.kill() == []
        assert [p for p in descendants if is_alive(p)] == []


def test_its_output_is_handed_on_line_by_line_and_kept() -> None:
    with family("print('one'); print('two')") as (child, lines):
        assert child.wait(PATIENCE)
        wait_until(lambda: child.tail() == ["one", "two"], PATIENCE, "all of it")
        assert lines == ["one", "two"]
        assert child.exit_code() == 0


def test_a_child_ends_when_its_starter_is_killed() -> None:
    starter = (
        "import os, sys, time; from openai_proxy.processes import Family;"
        "argv = [sys.executable, '-c', 'import time; time.sleep(1000)'];"
        "print(Family('x', argv, os.environ, print).pid, flush=True); time.sleep(1000)"
    )
    command = [sys.executable, "-c", starter]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        assert is_alive(child)
        process.kill()
    wait_until_gone([child])


def test_terminate_lets_the_child_end_in_its_own_way() -> None:
    source = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('up', flush=True)\n"
        "time.sleep(1000)"
    )
    with family(source) as (child, lines):
        wait_until(lambda: lines == ["up"], PATIENCE, "up")
        child.terminate()
        assert child.wait(PATIENCE)
        assert child.exit_code() == 7
