"""What is checked before anything starts, when there are several models."""

from __future__ import annotations

from pathlib import Path

import pytest

from openai_proxy import launchplan
from openai_proxy.launchplan import ServeOptions, check_several, triton_arguments
from openai_proxy.settings import ProxySettings
from tridentlm.config import EngineSettings
from tridentlm.errors import InvalidRequest


@pytest.fixture(params=[False, True])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    """A machine with or without a GPU."""
    device = tmp_path / "nvidiactl"
    if request.param:
        device.touch()
    monkeypatch.setattr(launchplan, "NVIDIA_DEVICE", device)
    return bool(request.param)


def test_two_models_of_one_name_are_refused(gpu: bool) -> None:
    settings = [EngineSettings(num_pages=8)] * 2
    check_several(settings, ["a", "b", "c"])
    with pytest.raises(InvalidRequest, match=r"called b\.") as caught:
        check_several(settings, ["a", "b", "b"])
    assert caught.value.param == "served_model_name"


def test_engines_on_one_gpu_must_say_how_much_they_take(gpu: bool) -> None:
    open_ended = EngineSettings(device="auto")
    check_several([open_ended], ["a"])
    for bounded in (
        EngineSettings(num_pages=8),
        EngineSettings(kv_memory_gb=1.0),
        EngineSettings(device="cpu"),
    ):
        check_several([bounded, bounded], ["a", "b"])
        if gpu:
            with pytest.raises(InvalidRequest, match="--kv-memory-gb"):
                check_several([bounded, open_ended], ["a", "b"])
        else:
            check_several([bounded, open_ended], ["a", "b"])


def test_triton_loads_every_ensemble_and_waits_for_the_longest_drain() -> None:
    options = ServeOptions(
        environ={},
        proxy=ProxySettings(),
        drain_seconds=30.0,
        ensembles=["generate", "b_generate", "submit", "b_submit"],
        repository=Path("/somewhere"),
    )
    arguments = triton_arguments(options)
    loaded = [a.partition("=")[2] for a in arguments if a.startswith("--load-model=")]
    assert loaded == ["generate", "b_generate", "submit", "b_submit"]
    assert "--exit-timeout-secs=36" in arguments
