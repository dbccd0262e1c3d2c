from __future__ import annotations

import pytest

from tests.text.families import FAMILIES
from tridentlm.config import EngineSettings
from tridentlm.hub import resolve_model
from tridentlm.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    """The default model's tokenizer, through the cache."""
    return Tokenizer.load(resolve_model(EngineSettings()))


@pytest.fixture(scope="session")
def families(smollm: Tokenizer) -> dict[str, Tokenizer]:
    small = {name: Tokenizer(make()) for name, make in FAMILIES.items()}
    return small | {"smollm": smollm}
