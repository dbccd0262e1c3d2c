from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.proxy.fakes import FakeSession, FakeText, Proxy, Reply, running_proxy
from tests.waiting import PATIENCE, free_ports


@pytest.fixture(scope="session")
def shared_proxy() -> Iterator[Proxy]:
    with running_proxy(max_body_mb=1) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared_proxy: Proxy) -> Proxy:
    """The shared server with its session as new."""
    session, fresh = shared_proxy.session, FakeSession()
    for name in ("ready", "status", "submissions", "streams", "aborted", "cancelled"):
        setattr(session, name, getattr(fresh, name))
    session.reply = lambda submission: Reply()
    vars(shared_proxy.text).update(vars(FakeText()))
    return shared_proxy


@pytest.fixture
def session(proxy: Proxy) -> FakeSession:
    return proxy.session


@pytest.fixture
def text(proxy: Proxy) -> FakeText:
    return proxy.text


@pytest.fixture
def http(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def client(proxy: Proxy) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def port() -> int:
    """One where nobody listens."""
    [made] = free_ports(1)
    return made
