"""Whether a model can be had on several ranks here, known before any of them starts."""

from __future__ import annotations

from tridentlm.config import EngineSettings
from tridentlm.errors import InvalidRequest
from tridentlm.gpus import visible_gpus
from tridentlm.hub import ModelFiles
from tridentlm.models.config import ModelConfig
from tridentlm.parallel.divide import divided


def check_ranks(settings: EngineSettings, files: ModelFiles) -> None:
    """Raises InvalidRequest for param `tp`, naming what works, when `settings.tp` does not.

    Reads the model's configuration alone; without torch.
    """
    if settings.tp == 1:
        return
    divided(_config(files), settings.tp)
    gpus = 0 if settings.device == "cpu" else visible_gpus()
    if settings.tp > gpus and (gpus or settings.device == "cuda"):
        works = f"tp can be 1 to {gpus}" if gpus else "device cpu takes any"
        raise InvalidRequest(
            f"tp is {settings.tp}, and {gpus} CUDA devices are visible: {works}.", param="tp"
        )


def _config(files: ModelFiles) -> ModelConfig:
    if files.kind == "hf":
        return ModelConfig.from_folder(files.path)
    from tridentlm.models.gguf_header import read_header

    header = read_header(files.path)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    return ModelConfig.from_gguf(header.metadata, shapes, None)
