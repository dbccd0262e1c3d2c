from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from tests.factory import FAMILIES, make_tiny_model
from tests.models.plans import Chunk, PlanMaker
from tridentlm.backends.base import KVCache
from tridentlm.backends.torch import TorchBackend
from tridentlm.core.plan import StepPlan
from tridentlm.hub import ModelFiles
from tridentlm.models import loading
from tridentlm.models.checkpoint import SafetensorsFolder
from tridentlm.models.config import ModelConfig
from tridentlm.models.decoder import Decoder

PAGE, PAGES = 4, 200


class Engine:
    """Decoder, torch backend and plans, without a scheduler: logits of the rows that sample."""

    def __init__(self, decoder: Decoder) -> None:
        cache = KVCache(decoder.config, PAGES, PAGE, torch.float32, torch.device("cpu"))
        self.decoder, self.backend = decoder, TorchBackend(cache)
        self.plans = PlanMaker(PAGES, PAGE)

    def logits(self, *chunks: Chunk) -> torch.Tensor:
        return self.run(self.plans.step(chunks))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> torch.Tensor:
        rows = torch.from_numpy(plan.query_starts[plan.sampled + 1] - 1)
        step = self.backend.begin_step(plan)
        hidden = self.decoder.forward(torch.from_numpy(plan.token_ids), step, rows)
        return self.decoder.logits(hidden)


@dataclass(frozen=True)
class Reference:
    """A model folder and what transformers makes of it."""

    folder: Path
    model: transformers.PreTrainedModel

    @property
    def files(self) -> ModelFiles:
        return ModelFiles("hf", self.folder, "tiny", self.folder)

    def engine(self) -> Engine:
        return Engine(load(self.folder))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def load(folder: Path) -> Decoder:
    config = ModelConfig.from_folder(folder)
    weights = loading.load(config, SafetensorsFolder(folder), torch.float32, torch.device("cpu"))
    return Decoder(config, weights)


def reference(folder: Path) -> Reference:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Reference(folder, model.eval())


@pytest.fixture(scope="session", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    return reference(make_tiny_model(request.param, folder))


@pytest.fixture
def engine(tiny: Reference) -> Engine:
    return tiny.engine()


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    torch.set_num_threads(1)  # tiny matrices: a second thread only waits for the first
