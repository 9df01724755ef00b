"""Instructions: UTF-8 bytes -> features. Learned with the policy by default; or a frozen CLIP text encoder.

An instruction is the same at every step of an episode, so each distinct one of a batch is encoded once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from prism.errors import PrismError, check_choices, check_numbers
from prism.sensors import decode_text

TextKind = Literal["learned", "clip"]


@dataclass(frozen=True)
class TextConfig:
    kind: TextKind = "learned"
    features: int = 128
    width: int = 64  # learned: of a byte's embedding; twice as much inside
    gates: bool = False  # the sentence also scales the features of the other sensors (FiLM): which of them count
    # vector sensors that describe this number of objects with the same entries; the sentence picks among them
    things: dict[str, int] = field(default_factory=dict)
    picks: int = 8  # number of picks; an object may be picked twice
    clip: str = "openai/clip-vit-base-patch32"  # paper, App. D: ViT-B/32; a local folder, or a name on the hub
    clip_features: int = 512  # of that model

    def __post_init__(self) -> None:
        check_choices(self, "encoder.text")
        check_numbers(self, "encoder.text", {"[1, inf)": "features width clip_features picks"})
        if self.things and min(self.things.values()) < 1:
            raise PrismError(f"encoder.text.things is {self.things}; a sensor holds 1 or more")


class ByteText(nn.Module):
    """Bytes and their positions through two convolutions (13 bytes wide: a word or two), mean and maximum over time.

    Positions go in before the first non-linearity, so "red onto blue" and "blue onto red" differ.
    """

    def __init__(self, config: TextConfig, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, config.width)
        self.position = nn.Parameter(0.1 * torch.randn(length, config.width))
        self.conv1 = nn.Conv1d(config.width, 2 * config.width, 5, padding=2)
        self.conv2 = nn.Conv1d(2 * config.width, 2 * config.width, 5, padding=4, dilation=2)
        self.project = nn.Linear(4 * config.width, config.features)

    def forward(self, text: UInt8[Tensor, "N L"]) -> Float[Tensor, "N F"]:
        distinct, which = torch.unique(text, dim=0, return_inverse=True)
        inside = (distinct != 0).unsqueeze(1)  # (U, 1, L); what lies behind the end must not matter
        x = (self.embed(distinct.int()) + self.position).transpose(1, 2) * inside
        x = F.gelu(self.conv1(x)) * inside
        x = F.gelu(self.conv2(x))
        mean = (x * inside).sum(-1) / inside.sum(-1).clamp_min(1)
        most = torch.where(inside, x, torch.full_like(x, -1.0)).amax(-1)  # gelu stays above -1
        y: Tensor = self.project(torch.cat([mean, most], dim=1))
        return y[which]


class ClipText(nn.Module):
    """Embeddings of a frozen CLIP text model through a trained linear layer.

    CLIP itself is no part of the policy's weights: it is read when the first instruction arrives, from the folder
    or the hub, and every distinct instruction is embedded once a process.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.model = FrozenClip(config.clip, config.clip_features)
        self.project = nn.Linear(config.clip_features, config.features)

    def forward(self, text: UInt8[Tensor, "N L"]) -> Float[Tensor, "N F"]:
        distinct, which = torch.unique(text, dim=0, return_inverse=True)
        embedded = self.model.embed([decode_text(row.cpu().numpy()) for row in distinct])
        y: Tensor = self.project(embedded.to(self.project.weight.device))
        return y[which]


class FrozenClip:
    """No nn.Module on purpose: it is neither trained, nor averaged, nor saved with the policy."""

    def __init__(self, source: str, features: int) -> None:
        self.source, self.features = source, features
        self._known: dict[str, Tensor] = {}
        self._loaded: tuple[Any, Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenClip:
        return self  # the averaged copy of a policy shares it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    def embed(self, texts: list[str]) -> Float[Tensor, "N C"]:
        """(N, clip_features), of length 1, on the CPU."""
        if new := [text for text in dict.fromkeys(texts) if text not in self._known]:
            tokenizer, model = self._load()
            with torch.inference_mode(False), torch.no_grad():  # kept for training too, which inference tensors are not
                tokens = tokenizer(new, padding=True, truncation=True, return_tensors="pt")
                found = F.normalize(model(**tokens).text_embeds.float(), dim=-1)
            if found.shape[1] != self.features:
                raise PrismError(
                    f"{self.source}: gives {found.shape[1]} features, not {self.features}; "
                    f"set policy.encoder.text.clip_features to {found.shape[1]}"
                )
            self._known |= dict(zip(new, found, strict=True))
        return torch.stack([self._known[text] for text in texts])

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            try:
                from transformers import CLIPTextModelWithProjection, CLIPTokenizer
            except ImportError as error:
                raise PrismError(
                    f"encoder.text.kind is 'clip', which needs transformers ({error.name} is missing): "
                    "pip install 'prism-policy[clip]', or use kind 'learned'"
                ) from error
            local = Path(self.source).is_dir()
            try:
                tokenizer = CLIPTokenizer.from_pretrained(self.source, local_files_only=local)
                model = CLIPTextModelWithProjection.from_pretrained(
                    self.source, local_files_only=local, use_safetensors=True
                )
            except (OSError, ValueError) as error:
                raise PrismError(
                    f"{self.source}: no CLIP text model could be read ({' '.join(str(error).split())[:160]}); give a "
                    "folder with config.json, model.safetensors and the tokenizer, or a name on the hub"
                ) from error
            self._loaded = (tokenizer, model.eval().requires_grad_(False))
        return self._loaded
