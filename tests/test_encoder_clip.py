"""The frozen CLIP text encoder, on a tiny one with random weights in a local folder."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from prism.encoder import EncoderConfig, make_sensor_encoder
from prism.encoders.kinds import NetworkEncoder, SensorEncoder
from prism.encoders.text import ClipText, TextConfig
from prism.errors import PrismError
from prism.normalize import Normalizer
from prism.sensors import SensorSpec, encode_text

TEXT = SensorSpec("text", "text", (32,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("clip")
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    transformers.CLIPTokenizer.from_pretrained(path, model_max_length=16).save_pretrained(path)
    config = transformers.CLIPTextConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, projection_dim=12, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=len(words) - 2, eos_token_id=len(words) - 1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.CLIPTextModelWithProjection(config).save_pretrained(path)
    return path


def _encoder(source: object, features: int = 12) -> SensorEncoder:
    text = TextConfig("clip", features=8, clip=str(source), clip_features=features)
    return make_sensor_encoder(TEXT, EncoderConfig(text=text), Normalizer.empty((), 1))


def _stream(*texts: str) -> torch.Tensor:
    return torch.from_numpy(np.stack([encode_text(text, 32) for text in texts]))


def test_embeds_each_instruction_once_trains_only_the_projection_and_saves_no_clip(folder: Path) -> None:
    encoder = _encoder(folder)
    assert isinstance(encoder, NetworkEncoder)
    assert isinstance(encoder.backbone, ClipText)
    clip = encoder.backbone.model
    assert clip._loaded is None  # a policy is built without it
    there = torch.ones(4, dtype=torch.bool)
    features = encoder(_stream("open the drawer", "press", "open the drawer", "pull"), there, None)
    assert features.shape == (4, 8)
    torch.testing.assert_close(features[0], features[2])
    assert (features[0] - features[1]).abs().max() > 1e-4
    assert set(clip._known) == {"open the drawer", "press", "pull"}
    assert {name for name, _ in encoder.named_parameters()} == {
        "absent",
        "backbone.project.weight",
        "backbone.project.bias",
    }
    assert set(encoder.state_dict()) == {name for name, _ in encoder.named_parameters()}
    features.sum().backward()
    copied = copy.deepcopy(encoder)  # as the average of the weights is made
    assert isinstance(copied.backbone, ClipText)
    assert copied.backbone.model is clip

    tokenizer, model = clip._load()
    calls = 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return model(*args, **kwargs)

    clip._loaded = (tokenizer, counted)
    with torch.inference_mode():
        encoder(_stream("press", "pull"), there[:2], None)
        assert calls == 0
        encoder(_stream("new"), there[:1], None)
        assert calls == 1
    encoder(_stream("new"), there[:1], None).sum().backward()  # cached at inference, used in training


def test_padding_in_a_batch_does_not_change_an_embedding(folder: Path) -> None:
    one, other = _encoder(folder), _encoder(folder)
    assert isinstance(one.backbone, ClipText)
    assert isinstance(other.backbone, ClipText)
    alone = one.backbone.model.embed(["press"])
    together = other.backbone.model.embed(["press", "open the drawer"])
    torch.testing.assert_close(alone[0], together[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(2))


def test_what_is_wrong_is_said_in_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = torch.ones(1, dtype=torch.bool)
    with pytest.raises(PrismError, match="clip_features to 12"):
        _encoder(folder, features=512)(_stream("a"), there, None)
    with pytest.raises(PrismError, match="no CLIP text model could be read"):
        _encoder(tmp_path)(_stream("a"), there, None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PrismError, match=r"prism-policy\[clip\]"):
        _encoder(folder)(_stream("a"), there, None)


def test_impossible_text_configs_are_refused() -> None:
    with pytest.raises(PrismError, match=r"encoder\.text\.kind"):
        TextConfig(kind="bert")  # type: ignore[arg-type]
    with pytest.raises(PrismError, match="clip_features"):
        TextConfig(clip_features=0)
