"""What rounding to FP8 costs a real model, SmolLM2-135M, on a fixed text.

The measure is the mean Kullback-Leibler divergence of the next token's distribution from that in
float32. The yardstick is noise: e4m3 has 3 bits after the point, so rounding displaces a number by
0.0265 of itself (root mean square, numbers spread evenly over the binades: (1/8) / sqrt(12) *
sqrt(3 / (8 ln 2))). Independent random errors of that size in weights and inputs of all linear
layers cost what the format must; a scale that is 5% wrong costs twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.models.plans import Chunk, PlanMaker
from tridentlm import hub
from tridentlm.backends.base import KVCache
from tridentlm.backends.torch import TorchBackend
from tridentlm.hub import ModelFiles
from tridentlm.models import decoder, loading
from tridentlm.models.decoder import Decoder
from tridentlm.models.gguf import GGUFModel
from tridentlm.text.tokenizer import Tokenizer

TEXT = """\
The harbour town had grown slowly around its single pier. In the early years only fishermen came, \
and they stayed for a season at most; later a railway reached the coast, and with it came \
merchants, teachers and a small hospital. By the time the lighthouse was built, nearly four \
thousand people lived between the cliffs and the river, and most of them worked in one way or \
another with the sea.

Water boils at a lower temperature on a mountain than at the coast, because the pressure of the \
air falls with height. A cook who moves to a high valley soon notices that beans take longer to \
soften and that bread rises faster than it used to. The same rule explains why a closed pot with a \
heavy lid cooks food more quickly: the steam cannot escape, the pressure goes up, and the water \
becomes hotter before it turns into vapour."""

ROUNDING = 1 / 8 / math.sqrt(12) * math.sqrt(3 / (8 * math.log(2)))
CPU = torch.device("cpu")
PAGES, PAGE = 20, 16

Weights = dict[str, torch.Tensor]


class NoisyLinear:
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = noisy(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(noisy(x), self._weight)


def noisy(values: torch.Tensor) -> torch.Tensor:
    return values * (1 + ROUNDING * torch.randn_like(values))


class Judge:
    """Next-token distributions over the text: by a float32 model, and how far others are off."""

    def __init__(self) -> None:
        path = hub.default_model()
        self._model = GGUFModel(path)
        self._ids = Tokenizer.load(ModelFiles("gguf", path, "m", path)).encode(TEXT)
        self._loaded: dict[bool, Weights] = {}
        self._truth = self._logs(self.load())
        self.nll = self._nll(self._truth)

    def load(self, quantize: bool = False) -> Weights:
        """To be used up, but not changed in place."""
        if quantize not in self._loaded:
            self._loaded[quantize] = loading.load(
                self._model.config, self._model, torch.float32, CPU, quantize=quantize
            )
        return dict(self._loaded[quantize])

    def divergence(self, weights: Weights) -> tuple[float, float]:
        """The mean divergence from the float32 model, and the ratio of the perplexities."""
        logs = self._logs(weights)
        divergence = (self._truth.exp() * (self._truth - logs)).sum(-1).mean()
        return float(divergence), math.exp(self._nll(logs) - self.nll)

    def _nll(self, logs: torch.Tensor) -> float:
        return -float(logs[:-1].gather(1, torch.tensor(self._ids[1:])[:, None]).mean())

    @torch.inference_mode()
    def _logs(self, weights: Weights) -> torch.Tensor:
        model = Decoder(self._model.config, weights)
        cache = KVCache(model.config, PAGES, PAGE, torch.float32, CPU)
        plan = PlanMaker(PAGES, PAGE).step([Chunk(0, self._ids)])
        step = TorchBackend(cache).begin_step(plan)
        hidden = model.forward(torch.from_numpy(plan.token_ids), step)
        return model.logits(hidden).log_softmax(-1)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.fixture(scope="module")
def noise(judge: Judge) -> float:
    """What random errors of the format's size cost."""

    def make_noisy(weights: Weights, prefix: str, *_: object) -> NoisyLinear:
        return NoisyLinear(weights.pop(prefix + "weight"))

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        patch.setattr(decoder, "make_linear", make_noisy)
        return judge.divergence(judge.load())[0]


def scaled(factor: float) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for name, tensor in weights.items():
            if name.endswith(".scale"):
                weights[name] = tensor * factor

    return change


def shift(weights: Weights) -> None:
    for name, tensor in weights.items():
        if name.endswith(".scale"):
            weights[name] = tensor.roll(1)


def test_fp8_costs_no_more_than_random_errors_of_its_size(judge: Judge, noise: float) -> None:
    divergence, perplexity = judge.divergence(judge.load(quantize=True))
    assert 0.5 * noise < divergence < 1.4 * noise
    assert perplexity < 1.08


@pytest.mark.parametrize("damage", [scaled(1.05), scaled(0.95), shift], ids=["+5%", "-5%", "row"])
def test_the_bound_tells_a_wrong_scale(
    judge: Judge, noise: float, damage: Callable[[Weights], None]
) -> None:
    weights = judge.load(quantize=True)
    damage(weights)
    assert judge.divergence(weights)[0] > 1.4 * noise
