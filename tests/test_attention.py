"""Attention against its float64 references, and the properties that the generator relies on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prism.attention import (
    Attention,
    AttentionConfig,
    Kind,
    Linear,
    Resolved,
    choose,
    effective_features,
    gaussian_features,
    linear_attend,
    linear_keys,
    of_length,
    orthogonal_features,
    softmax_attention,
)
from prism.errors import PrismError
from tests.reference import attention as reference

KINDS: tuple[Kind, ...] = ("softmax", "favor", "favor_paper", "auto", "uniform")
both_orders = pytest.mark.parametrize("m", [12, 64], ids=["many keys", "few keys"])  # of 7 keys in heads of 8


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def qkv(
    seed: int, batch: int = 2, heads: int = 3, t: int = 5, s: int = 7, d: int = 8, scale: float = 1.0
) -> list[Tensor]:
    rng = generator(seed)
    return [scale * torch.randn(batch, heads, n, d, generator=rng) for n in (t, s, s)]


Call = Callable[..., Tensor]


def attention_of(kind: Resolved, w: Tensor) -> Call:
    if kind == "softmax":
        return softmax_attention
    return lambda q, k, v, mask=None: linear_attend(kind, q, linear_keys(kind, k, v, w, mask), w)


@pytest.mark.parametrize("kind", ["softmax", "favor", "favor_paper"])
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
@both_orders
def test_matches_reference(m: int, kind: Resolved, scale: float) -> None:
    q, k, v = qkv(1, scale=scale)
    w = orthogonal_features(m, 8, generator(2))
    out = attention_of(kind, w)(q, k, v).double().numpy()
    w64 = w.double().numpy()
    for b in range(2):
        for h in range(3):
            inputs = [x[b, h].double().numpy() for x in (q, k, v)]
            expected = {
                "softmax": lambda inputs=inputs: reference.softmax(*inputs),
                "favor": lambda inputs=inputs: reference.favor(*inputs, w64),
                "favor_paper": lambda inputs=inputs: reference.favor_paper(*inputs, w64),
            }[kind]()
            np.testing.assert_allclose(out[b, h], expected, rtol=2e-4, atol=2e-5 * scale)


@both_orders
def test_linear_attention_takes_the_cheaper_order(m: int) -> None:
    _, k, v = qkv(1)
    kinds: tuple[Linear, ...] = ("favor", "favor_paper")
    for kind in kinds:
        linear = linear_keys(kind, k, v, orthogonal_features(m, 8, generator(2)))
        assert linear.sums.shape == ((2, 3, 12, 9) if m == 12 else (2, 3, 64, 7))
        assert (linear.values is None) == (m == 12)


def test_favor_weights_estimate_those_of_softmax() -> None:
    """E[phi(q) . phi(k)] is proportional to exp(q . k / sqrt(d)): of one-hot values, attention is its weights."""
    q, k, _ = qkv(3, batch=1, heads=1, scale=0.7)
    call = attention_of("favor", orthogonal_features(1 << 16, 8, generator(4)))
    weights = call(q, k, torch.eye(7).expand(1, 1, 7, 7))
    assert (weights / torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, dim=-1) - 1).abs().max() < 0.1


@settings(max_examples=20, deadline=None)
@given(blocks=st.integers(1, 4), d=st.integers(1, 16), seed=st.integers(0, 1000))
def test_orthogonal_features_are_orthogonal_in_blocks(blocks: int, d: int, seed: int) -> None:
    m = max(1, blocks * d - 1)  # the last block is cut
    w = orthogonal_features(m, d, generator(seed)).double()
    assert w.shape == (m, d)
    for start in range(0, m, d):
        gram = w[start : start + d] @ w[start : start + d].T
        off = gram - torch.diag(gram.diagonal())
        assert off.abs().max() < 1e-4 * gram.diagonal().max()


def test_orthogonal_features_are_standard_normal_one_by_one() -> None:
    d = 8
    w = orthogonal_features(80_000, d, generator(5)).double()
    assert abs(w.square().sum(dim=1).mean() - d) < 0.1  # chi-squared with d degrees of freedom: mean d, variance 2 d
    assert abs(w.square().sum(dim=1).var() - 2 * d) < 0.5
    assert w.mean(dim=0).abs().max() < 0.02
    assert abs(w.pow(4).mean() - 3) < 0.1  # kurtosis of a Gaussian


def test_favor_error_falls_with_features_and_the_literal_one_does_not() -> None:
    def error(kind: Resolved, m: int) -> float:
        errors = []
        for seed in range(12):
            q, k, v = qkv(100 + seed, t=16, s=16, d=16, scale=0.5)
            draw = orthogonal_features if kind == "favor" else gaussian_features
            out = attention_of(kind, draw(m, 16, generator(seed)))(q, k, v)
            exact = softmax_attention(q, k, v)
            errors.append(float((out - exact).norm() / exact.norm()))
        return float(np.median(errors))

    few, many, most = (error("favor", m) for m in (16, 256, 4096))
    assert many < few / 2
    assert most < many / 2
    assert most < 0.05
    paper_few, paper_most = error("favor_paper", 256), error("favor_paper", 4096)
    assert paper_most > 0.7 * paper_few
    assert paper_most > 5 * most


@pytest.mark.parametrize("kind", ["softmax", "favor", "favor_paper"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
@both_orders
def test_order_of_keys_does_not_matter(m: int, kind: Resolved, seed: int) -> None:
    q, k, v = qkv(seed)
    order = torch.randperm(k.shape[2], generator=generator(seed))
    call = attention_of(kind, orthogonal_features(m, 8, generator(seed)))
    torch.testing.assert_close(call(q, k[:, :, order], v[:, :, order]), call(q, k, v), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "favor", "favor_paper"])
@given(seed=st.integers(0, 10_000), kept=st.integers(1, 7))
@settings(max_examples=15, deadline=None)
@both_orders
def test_masking_keys_equals_removing_them(m: int, kind: Resolved, seed: int, kept: int) -> None:
    """Even when the masked keys hold huge numbers: they may not enter the stabiliser."""
    q, k, v = qkv(seed)
    call = attention_of(kind, orthogonal_features(m, 8, generator(seed)))
    keep = torch.randperm(7, generator=generator(seed))[:kept].sort().values
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[:, keep] = True
    garbage_k, garbage_v = k.clone(), v.clone()
    garbage_k[:, :, ~mask[0]] = 1e3
    garbage_v[:, :, ~mask[0]] = 1e30
    masked = call(q, garbage_k, garbage_v, mask)
    torch.testing.assert_close(masked, call(q, k[:, :, keep], v[:, :, keep]), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "favor", "favor_paper"])
@both_orders
def test_no_key_left_gives_zeros_and_finite_gradients(m: int, kind: Resolved) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(6))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1] = False
    out = attention_of(kind, orthogonal_features(m, 8, generator()))(q, k, v, mask)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[0].abs().max() > 0
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["softmax", "favor", "favor_paper"])
@both_orders
def test_each_batch_row_is_on_its_own(m: int, kind: Resolved) -> None:
    q, k, v = qkv(7, batch=4)
    call = attention_of(kind, orthogonal_features(m, 8, generator()))
    whole = call(q, k, v)
    for b in range(4):
        row = slice(b, b + 1)
        torch.testing.assert_close(call(q[row], k[row], v[row]), whole[row], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["softmax", "favor", "favor_paper"])
@pytest.mark.parametrize("size", [50.0, 1e-30, 0.0])
def test_extreme_inputs_stay_finite(kind: Resolved, size: float) -> None:
    q, k, v = (x.sign().mul_(size).requires_grad_() for x in qkv(8, d=16))
    out = attention_of(kind, orthogonal_features(64, 16, generator()))(q, k, v)
    assert out.isfinite().all()
    assert out.abs().max() <= size * 1.001  # an average of the values
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("m", [10, 40], ids=["many keys", "few keys"])
def test_gradient_of_favor_is_that_of_its_estimate(m: int) -> None:
    """The stabilisers carry no gradient: they cancel. Checked against finite differences in float64."""
    q, k, v = (x.double().requires_grad_() for x in qkv(9, batch=1, heads=1, t=3, s=4, d=4))
    w = orthogonal_features(m, 4, generator()).double()
    assert torch.autograd.gradcheck(attention_of("favor", w), (q, k, v), eps=1e-6, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("length", [0.5, 1.0, 2.0])
@both_orders
def test_favor_at_a_fixed_length_matches_the_reference(m: int, length: float) -> None:
    q, k, v = qkv(3, scale=5.0)
    k[0, 0, 0] = 0.0  # a token of zeros has no direction
    w = orthogonal_features(m, 8, generator(2))
    call = attention_of("favor", w)
    out = call(of_length(q, length), of_length(k, length), v).double().numpy()
    for b in range(2):
        for h in range(3):
            rows = [x[b, h].double().numpy() for x in (q, k)]
            sized = [reference.of_length(x, length) for x in rows]
            expected = reference.favor(*sized, v[b, h].double().numpy(), w.double().numpy())
            np.testing.assert_allclose(out[b, h], expected, rtol=1e-4, atol=1e-5)


@both_orders
def test_effective_features_match_the_reference_and_fall_with_length(m: int) -> None:
    q, k, v = qkv(4, batch=1, heads=1)
    w = orthogonal_features(m, 8, generator(2))
    found = []
    for length in (0.1, 1.0, 4.0):
        sized_q, sized_k = of_length(q, length), of_length(k, length)
        ours = float(effective_features("favor", sized_q, linear_keys("favor", sized_k, v, w), w))
        rows = [x[0, 0].double().numpy() for x in (sized_q, sized_k)]
        assert ours == pytest.approx(reference.effective_features(*rows, w.double().numpy()), rel=2e-2)  # eps
        found.append(ours)
    assert m > found[0] > found[1] > found[2] >= 1.0


# --------------------------------------------------------------------------- module


def module(kind: Kind, width: int = 16, heads: int = 4, **more: float) -> Attention:
    torch.manual_seed(0)  # the initial weights; the features have their own generator
    return Attention(width, AttentionConfig(kind=kind, heads=heads, features=24, **more), generator())  # type: ignore[arg-type]


def test_uniform_attention_is_the_mean_of_the_values_that_count() -> None:
    attention = module("uniform")
    x, context = torch.randn(2, 5, 16, generator=generator(1)), torch.randn(2, 4, 16, generator=generator(2))
    mask = torch.tensor([[True, True, False, True], [False] * 4])
    out = attention(x, attention.keys_values(context, mask))
    values = torch.nn.functional.linear(context, attention.in_proj.weight[32:], attention.in_proj.bias[32:])
    kept = values[0][mask[0]].detach().double().numpy()
    mean = reference.uniform(x[0].numpy(), kept) @ attention.out_proj.weight.detach().double().numpy().T
    expected = mean + attention.out_proj.bias.detach().numpy()
    np.testing.assert_allclose(out[0].detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[1], attention.out_proj.bias.expand(5, -1))


@pytest.mark.parametrize("bound", [1.0, 2.0])
def test_lengths_of_queries_and_keys_stay_within_their_bound(bound: float) -> None:
    attention = module("favor", length=1.0, length_bound=bound)
    assert ("length" in dict(attention.named_parameters())) == (bound > 1)
    x, context = 50 * torch.randn(2, 3, 6, 16, generator=generator(1)), torch.randn(2, 4, 16, generator=generator(2))

    def seen() -> tuple[float, float, float]:
        attention(x, attention.keys_values(context)).square().sum().backward()
        assert attention.seen is not None
        queries, keys, features = attention.seen
        return float(queries), float(keys), float(features)

    assert seen()[:2] == pytest.approx((1.0, 1.0), rel=1e-2)
    if attention.length is None:
        return
    assert attention.length.grad is not None
    assert attention.length.grad.abs().max() > 0
    for learned, squared in ((100.0, bound**2), (-100.0, bound**-2)):
        attention.length.data.fill_(learned)
        assert seen()[:2] == pytest.approx((squared, squared), rel=1e-2)


def test_lengths_are_watched_in_training_with_gradient_only() -> None:
    attention, x = module("favor"), torch.randn(2, 6, 16, generator=generator(1))
    with torch.no_grad():
        attention(x)
    attention.eval()(x)
    assert attention.seen is None
    attention.train()(100 * x)
    assert attention.seen is not None
    queries, _, features = attention.seen
    assert float(queries) > 100
    assert 1 <= float(features) < 3
    assert all(module(kind)(x).shape == x.shape for kind in KINDS)


@pytest.mark.parametrize("kind", ["softmax", "favor_paper", "uniform"])
def test_length_concerns_favor_alone(kind: Kind) -> None:
    x = torch.randn(2, 6, 16, generator=generator(1))
    assert torch.equal(module(kind)(x), module(kind, length=1.0, length_bound=2.0)(x))


@pytest.mark.parametrize("kind", KINDS)
def test_context_shared_by_candidates_equals_repeated_context(kind: Kind) -> None:
    attention = module(kind)
    x, context = torch.randn(3, 5, 6, 16, generator=generator(1)), torch.randn(3, 4, 16, generator=generator(2))
    mask = torch.tensor([[True, True, True, True], [True, False, True, True], [False, True, False, False]])
    shared = attention(x, attention.keys_values(context, mask))
    repeated = attention.keys_values(context.repeat_interleave(5, dim=0), mask.repeat_interleave(5, dim=0))
    torch.testing.assert_close(shared.flatten(0, 1), attention(x.flatten(0, 1), repeated), rtol=1e-4, atol=1e-6)
    flat = attention(x.flatten(0, 1), attention.keys_values(context, mask))
    torch.testing.assert_close(flat, shared.flatten(0, 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_self_attention_is_attention_to_itself(kind: Kind) -> None:
    attention = module(kind)
    x = torch.randn(3, 5, 6, 16, generator=generator(1))
    flat = x.flatten(0, 1)
    torch.testing.assert_close(attention(x).flatten(0, 1), attention(flat, attention.keys_values(flat)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("keys", "folded"), [(1, True), (4, True), (9, True), (14, False)])
def test_module_matches_torch_multihead_attention(keys: int, folded: bool, masked: bool, bias: bool) -> None:
    """Outputs and all gradients, with the projections folded into the context and without."""
    attention = Attention(40, AttentionConfig("softmax", heads=2, bias=bias), generator())
    peer = torch.nn.MultiheadAttention(40, 2, bias=bias, batch_first=True)
    weights = attention.state_dict()
    peer.load_state_dict({k.replace("in_proj.", "in_proj_"): v for k, v in weights.items()})
    if bias:  # the initial biases of the peer's class are zeros, ours are not: nothing is tested by accident
        assert attention.in_proj.bias.abs().max() > 0
    x = torch.randn(3, 15, 40, generator=generator(1)).requires_grad_()
    context = torch.randn(3, keys, 40, generator=generator(2)).requires_grad_()
    mask = torch.rand(3, keys, generator=generator(3)) < 0.6 if masked else None
    if mask is not None:
        mask[:, 0] = True
    kv = attention.keys_values(context, mask, queries=15)
    assert (kv.folded is not None) == folded
    out = attention(x, kv)
    expected, _ = peer(x, context, context, key_padding_mask=None if mask is None else ~mask, need_weights=False)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    up = torch.randn(out.shape, generator=generator(4))
    ours = torch.autograd.grad(out, [x, context, *attention.parameters()], up)
    theirs = torch.autograd.grad(expected, [x, context, *peer.parameters()], up)
    names = ["x", "context", *(name.replace("in_proj.", "in_proj_") for name, _ in attention.named_parameters())]
    peer_names = ["x", "context", *(name for name, _ in peer.named_parameters())]
    expected_grads = dict(zip(peer_names, theirs, strict=True))
    for name, gradient in zip(names, ours, strict=True):
        torch.testing.assert_close(gradient, expected_grads[name], rtol=1e-3, atol=1e-4)


def test_folded_context_with_no_key_left_gives_the_output_bias() -> None:
    attention = Attention(32, AttentionConfig("softmax", heads=2), generator())
    context = torch.randn(2, 3, 32, generator=generator(1))
    kv = attention.keys_values(context, torch.tensor([[False] * 3, [True] * 3]), queries=6)
    assert kv.folded is not None
    out = attention(torch.randn(2, 6, 32, generator=generator(2)), kv)
    torch.testing.assert_close(out[0], attention.out_proj.bias.expand(6, -1))
    assert (out[1] - attention.out_proj.bias).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_finite_gradient(kind: Kind) -> None:
    attention = module(kind)
    x, context = torch.randn(3, 2, 6, 16, generator=generator(1)), torch.randn(3, 4, 16, generator=generator(2))
    (attention(x, attention.keys_values(context)).square().sum() + attention(x).square().sum()).backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_random_features_are_saved_and_not_trained() -> None:
    attention, other = module("favor"), Attention(16, AttentionConfig("favor", 4, 24), generator(1))
    assert "random_features" in attention.state_dict()
    assert "random_features" not in dict(attention.named_parameters())
    other.load_state_dict(attention.state_dict())
    x = torch.randn(2, 6, 16, generator=generator(1))
    assert torch.equal(attention(x), other(x))


def test_features_depend_only_on_their_generator() -> None:
    torch.manual_seed(1)
    first = Attention(16, AttentionConfig("favor", 4, 24), generator(3)).random_features
    torch.manual_seed(2)
    second = Attention(16, AttentionConfig("favor", 4, 24), generator(3)).random_features
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


def test_autocast_keeps_the_features_in_float32() -> None:
    attention = module("favor")
    x = 20 * torch.randn(2, 6, 16, generator=generator(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(x)
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


@settings(max_examples=50, deadline=None)
@given(t=st.integers(1, 5000), s=st.integers(1, 5000), m=st.integers(1, 512), d=st.sampled_from([8, 16, 64]))
def test_automatic_choice_is_monotone_and_exact_when_short(t: int, s: int, m: int, d: int) -> None:
    picked = choose("auto", t, s, m, d)
    assert picked in ("softmax", "favor")
    if min(t, s) <= m:  # then T S <= (T + S) M: exact computes fewer entries
        assert picked == "softmax"
    if picked == "favor":
        assert choose("auto", t + 1, s, m, d) == "favor"
        assert choose("auto", t, s + 1, m, d) == "favor"
    assert choose("favor_paper", t, s, m, d) == "favor_paper"


def test_auto_is_exact_at_the_papers_sizes_and_linear_when_long() -> None:
    assert choose("auto", 16 * 16, 8, 256, 64) == "softmax"
    assert choose("auto", 4096, 4096, 256, 64) == "favor"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kind": "flash"}, "kind"),
        ({"heads": 0}, "heads"),
        ({"features": 0}, "features"),
        ({"length": -1.0}, "length"),
        ({"length_bound": 0.5}, "length_bound"),
    ],
)
def test_bad_config_is_one_clear_line(change: dict[str, object], word: str) -> None:
    with pytest.raises(PrismError, match=word) as caught:
        AttentionConfig(**change)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_width_must_divide_into_heads() -> None:
    with pytest.raises(PrismError, match="heads"):
        Attention(10, AttentionConfig(heads=4), generator())


def test_queries_must_divide_over_contexts() -> None:
    attention = module("softmax")
    with pytest.raises(ValueError, match="contexts"):
        attention(torch.zeros(4, 3, 16), attention.keys_values(torch.zeros(5, 2, 16)))
