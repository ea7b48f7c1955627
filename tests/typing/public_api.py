"""Typed use of all exported names: `make lint` runs `mypy --strict` on this file."""

from pathlib import Path
from typing import assert_type

import lightning as L
import timm
from torch import Tensor, nn

import dclm
import dcvision
import dcvl
from dclm.huggingface import DCFormerForCausalLM, DCLMForCausalLM, DCLMForMaskedLM, DCPythiaForCausalLM
from dcmha import (
    COMPOSE_OPTIONS,
    ComposeCost,
    ComposedAttentionBase,
    ComposeOptions,
    ComposeProjection,
    ComposeWeights,
    ContextKV,
    DCAttention,
    DCCrossAttention,
    DecodingCache,
    ShardedDim,
    SideWeights,
    approximate_overhead,
    attention_flops,
    compose_cost,
    compose_options_of,
    composed_attention,
    record_attention,
    resolve_impl,
    rotary_embedding,
    split_heads,
    visible_pairs,
)
from dcmha.analysis import (
    BRANCHES,
    Branch,
    Breakdown,
    Diversity,
    HeadWeights,
    Mixing,
    MixingMeter,
    Recorded,
    Spread,
    attention_layers,
    composed_layers,
    composition_branches,
    head_diversity,
    head_outputs,
    head_weights,
    measure_mixing,
    model_diversity,
    scale_branches,
    scale_heads,
)
from dcmha.dispatch import ResolvedImpl
from dctrain.explain import CompositionScalars


def operator(q: Tensor, k: Tensor, v: Tensor, down: Tensor, base: Tensor) -> None:
    pre = ComposeWeights(SideWeights(down, down, None), SideWeights(), base)
    out = composed_attention(q, k, v, pre, None, is_causal=True, window_size=256, num_groups=2, impl="auto")
    assert_type(out, Tensor)
    assert_type(resolve_impl("auto", q, is_composed=True).impl, ResolvedImpl)


def layers(x: Tensor, context: Tensor, positions: Tensor) -> None:
    layer = DCAttention(384, 6, norm_layer=nn.LayerNorm, rank=1, window_size=256)
    base: ComposedAttentionBase = layer
    assert_type(base.options, ComposeOptions)
    assert_type(DCAttention.with_options(rank=1), type[DCAttention])
    cache = DecodingCache([256], capacity=2048)
    y: Tensor = layer(x, is_causal=True, rope=rotary_embedding(positions, 64), cache=cache.layers[0])
    cross = DCCrossAttention(384, 6, context_dim=512)
    memory = cross.precompute_kv(context)
    assert_type(memory, ContextKV)
    y = cross(y, memory)
    assert_type(split_heads(layer, 2), dict[str, ShardedDim])
    print(ComposeProjection(384, 6, **compose_options_of(layer.options)), COMPOSE_OPTIONS)


def costs() -> None:
    assert_type(compose_cost(384, 6, 197, 197, rank=2), ComposeCost)
    assert_type(approximate_overhead(64, 2, 0.5), tuple[float, float])
    assert_type(attention_flops(64, 6, visible_pairs(197, 197)), int)


def analysis(model: nn.Module, x: Tensor) -> None:
    with record_attention(model) as recorded:
        model(x)
    assert_type(recorded, dict[str, Recorded])
    assert_type(recorded["attn"].breakdown("pre", query=1, key=2), Breakdown)
    with record_attention(model, keep=lambda one: one.maps.scores) as scores:
        model(x)
    assert_type(scores, dict[str, Tensor])
    with measure_mixing(model) as meters:
        model(x)
    assert_type(meters, dict[str, dict[str, MixingMeter]])
    mixing = meters["attn"]["pre"].mixing()
    assert_type(mixing, Mixing)
    assert_type(mixing.sizes, dict[str, Spread])
    with scale_branches(model, dict.fromkeys(composition_branches(model), 0.0)), scale_heads(model, {"attn": x}):
        model(x)
    assert_type(composition_branches(model), list[Branch])
    assert_type(composed_layers(model), dict[str, ComposedAttentionBase])
    layer = attention_layers(model)["attn"]
    assert_type(head_weights(layer), HeadWeights)
    assert_type(head_outputs(layer, x, 0), Tensor)
    assert_type(head_diversity(layer), Diversity)
    assert_type(model_diversity(model), dict[str, Diversity])
    print(BRANCHES)


def images() -> None:
    vit = timm.create_model("vit_small_patch16_224")
    assert_type(dcvision.swap_attention(vit, layers=[-1], rank=1), nn.Module)
    module: L.LightningModule = dcvision.ImageClassifier("dcvit_small_patch16_224", num_classes=10)
    data: L.LightningDataModule = dcvision.ImageDataModule("train-{0000..0001}.tar", "val.tar", batch_size=8)
    L.Trainer(max_steps=1, callbacks=[CompositionScalars()]).fit(module, data)
    print(dcvision.models)


def language(ids: Tensor, folder: Path) -> None:
    config = dclm.decoder_config("dcformer_stdlib")
    assert_type(config, dclm.DecoderConfig)
    decoder = dclm.Decoder(config)
    assert_type(dclm.swap_attention(decoder, rank=1), dclm.Decoder)
    assert_type(dclm.generate(decoder, ids, 8), Tensor | list[Tensor])
    assert_type(dclm.beam_search(decoder, ids, 8, num_beams=4), list[Tensor])
    assert_type(dclm.load_pretrained(dclm.save_pretrained(decoder, folder)), dclm.Decoder)
    loaded = dclm.load_model(folder)
    pairs = dclm.encode_pairs(loaded.tokenizer, [("2 + 2 =", " 4")])
    print(dclm.log_likelihoods(loaded.decoder, [dclm.cut_left(pair, 2048) for pair in pairs]), dclm.CONFIGS)
    module: L.LightningModule = dclm.LanguageModel("dcformer_stdlib")
    data: L.LightningDataModule = dclm.TokenDataModule("tokens", context_length=256)
    L.Trainer(max_steps=1).fit(module, data)


def huggingface() -> None:
    for kind in (DCFormerForCausalLM, DCPythiaForCausalLM, DCLMForCausalLM, DCLMForMaskedLM):
        model: nn.Module = kind.from_pretrained("folder")
        print(model)


def images_with_text(network: dcvl.ImageText) -> None:
    module: L.LightningModule = dcvl.VisionLanguageModel()
    data: L.LightningDataModule = dcvl.CaptionDataModule("train.tar", "val.tar")
    L.Trainer(max_steps=1).fit(module, data)
    print(network.blocks)
