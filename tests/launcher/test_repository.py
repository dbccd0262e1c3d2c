from __future__ import annotations

from pathlib import Path

import pytest

from openai_proxy.options import model_choices
from openai_proxy.repository import (
    ENGINE_PACKAGE,
    ModelChoice,
    engine_configs,
    ensembles,
    ready_repository,
    write_repository,
)
from tridentlm.config import resolve_settings
from tridentlm.errors import InvalidRequest

MODELS = {"engine", "generate", "relay", "submit", "tokenizer"}


def test_a_written_repository_is_complete(tmp_path: Path) -> None:
    target = write_repository(tmp_path / "models")
    assert {path.name for path in target.iterdir()} == MODELS
    for name in MODELS:
        assert (target / name / "config.pbtxt").is_file()
        assert (target / name / "1").is_dir()
    original = ready_repository() / ENGINE_PACKAGE
    sources = {path.relative_to(original) for path in original.rglob("*.py")}
    copied = target / ENGINE_PACKAGE
    assert {path.relative_to(copied) for path in copied.rglob("*") if path.is_file()} == sources
    assert ensembles(target) == ["generate", "submit"]


def test_the_model_is_written_into_the_engines_parameters(tmp_path: Path) -> None:
    odd = 'folder with "quotes" and \\ in it'
    target = write_repository(tmp_path / "models", [ModelChoice(odd)])
    [parameters] = engine_configs(target)
    assert parameters["model"] == odd
    assert parameters["max_running"] == "256"
    assert [own["model"] for own in engine_configs(ready_repository())] == [""]


def test_one_model_leaves_all_but_its_parameter_as_it_is(tmp_path: Path) -> None:
    plain = write_repository(tmp_path / "plain")
    one = write_repository(tmp_path / "one", [ModelChoice("m")])
    for file in (path.relative_to(plain) for path in plain.glob("*/*") if path.is_file()):
        expected = (plain / file).read_bytes()
        if file == Path("engine", "config.pbtxt"):
            expected = expected.replace(
                b'"model" value { string_value: ""', b'"model" value { string_value: "m"'
            )
        assert (one / file).read_bytes() == expected


def test_several_models_stand_side_by_side_over_one_package(tmp_path: Path) -> None:
    choices = [
        ModelChoice("/m/first"),
        ModelChoice("org/B-2.5", "second,b"),
        ModelChoice("/x/second"),
    ]
    target = write_repository(tmp_path / "models", choices)
    further = {f"{prefix}{name}" for prefix in ("second_", "second-2_") for name in MODELS}
    assert {path.name for path in target.iterdir()} == MODELS | further
    assert len(list(target.rglob("tridentlm"))) == 1
    assert len(ensembles(target)) == 6
    config = (target / "second_submit" / "config.pbtxt").read_text()
    for name in ('name: "second_submit"', '"second_engine"', '"second_tokenizer"'):
        assert name in config
    assert '"engine"' not in config
    relay = (target / "second_relay" / "config.pbtxt").read_text()
    assert '{ name: "relay"' in relay
    assert '"engine" value { string_value: "second_engine" }' in relay
    assert "sys.path.append" in (target / "second_engine" / "1" / "model.py").read_text()


def test_each_of_several_engines_keeps_its_own_model_and_shares_the_rest(tmp_path: Path) -> None:
    choices = [ModelChoice("first"), ModelChoice("second", "b,c", "other")]
    target = write_repository(tmp_path / "models", choices)
    environ = {"TRIDENTLM_MODEL": "shared", "TRIDENTLM_MAX_RUNNING": "7"}
    settings = [resolve_settings(own, environ) for own in engine_configs(target)]
    assert {(s.model, s.served_names, s.tokenizer, s.max_running) for s in settings} == {
        ("first", (), "", 7),
        ("second", ("b", "c"), "other", 7),
    }


def test_a_repository_of_several_is_made_once_for_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIDENTLM_CACHE", str(tmp_path))
    first = ready_repository([ModelChoice("a"), ModelChoice("b")])
    assert first == ready_repository([ModelChoice("a"), ModelChoice("b")])
    assert first != ready_repository([ModelChoice("a"), ModelChoice("c")])
    assert {own["model"] for own in engine_configs(first)} == {"a", "b"}


def test_flags_that_can_be_repeated_become_models() -> None:
    def chosen(**given: list[str]) -> list[ModelChoice]:
        return model_choices(dict(given))

    assert chosen() == [ModelChoice()]
    assert chosen(model=["a"], served_model_name=["x,y", "z"]) == [ModelChoice("a", "x,y,z")]
    assert chosen(model=["a", "b"], served_model_name=["x", "y,z"]) == [
        ModelChoice("a", "x"),
        ModelChoice("b", "y,z"),
    ]
    for wrong in ({"served_model_name": ["x"]}, {"tokenizer": ["t", "t", "t"]}):
        with pytest.raises(InvalidRequest, match="once for each"):
            chosen(model=["a", "b"], **wrong)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(InvalidRequest, match="not an empty folder"):
        write_repository(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def test_a_folder_that_is_no_repository_of_ours_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=str(tmp_path)):
        engine_configs(tmp_path)
