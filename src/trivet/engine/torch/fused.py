"""The Llama shape (Llama, Qwen2, Qwen3) with as few operations a layer as plain torch allows.

q, k, v are one matrix product, gate and up another; keys and values are written into preallocated slots with
one indexed copy and read in place; query heads that share a key head are folded into the query's length, so
that keys are never repeated. The named tensors are views into the fused ones: an update writes through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trivet.engine.torch.cache import Cache, Span

_CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")

Attend = Callable[[Tensor, Tensor], Tensor]
"""(qkv (_T, heads, head size) after rotation, the layer's cache) -> attention output (_T, width)."""


def unsupported(model: Any, context: int) -> str | None:
    """Why the fused path does not fit `model`, or None."""
    config, kind = model.config, type(model).__name__
    if kind not in _CLASSES:
        return f"{kind} is not one of {', '.join(_CLASSES)}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    rope = getattr(model.model.rotary_emb, "rope_type", "default")
    if rope not in _STATIC_ROPE:
        return f"rope type {rope!r} changes with the length of the sequence"
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if sliding and (config.sliding_window or 0) < context:
        return f"sliding window of {config.sliding_window} is shorter than the context of {context}"
    return None


@dataclass(slots=True)
class _Layer:
    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    heads_norm: Tensor | None  # (query + key heads, head size)
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    cache: Tensor | None = None


class FusedModel:
    """Forward passes of a Llama-shaped model over a `Cache`."""

    grouped = True  # decode may be given rows in groups of similar length

    def __init__(self, model: Any, cache: Cache) -> None:
        """Copies the weights of `model` (a transformers module on the cache's device and dtype)."""
        config = model.config
        self.cache = cache
        self.hidden, self.eps = config.hidden_size, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._gains: list[tuple[Tensor, Tensor]] = []  # (named norm weight, where `_normed` reads it)
        # On a CPU an RMS norm is four plain operations: x / hypot(|x|, sqrt(n eps)) * (weight sqrt(n)).
        self.plain = cache.dtype == torch.float32 and cache.device.type == "cpu"
        self._floor = {n: torch.full((1,), (n * self.eps) ** 0.5) for n in (self.hidden, self.size)}
        self.embed = self._keep("model.embed_tokens.weight", model.model.embed_tokens.weight)
        self.layers = [self._layer(f"model.layers.{i}.", layer) for i, layer in enumerate(model.model.layers)]
        self.norm = self._gain("model.norm.weight", model.model.norm.weight)
        if model.lm_head.weight is model.model.embed_tokens.weight:
            self.head = self.embed
            self.aliases["lm_head.weight"] = "model.embed_tokens.weight"
        else:
            self.head = self._keep("lm_head.weight", model.lm_head.weight)
        self.vocab = len(self.embed)
        self._rotary(model.model.rotary_emb)
        self.refresh()

    # -- weights ---------------------------------------------------------------------------------

    def _keep(self, name: str, tensor: Tensor) -> Tensor:
        self.tensors[name] = tensor.detach().clone()
        return self.tensors[name]

    def _gain(self, name: str, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Keep a norm's weight and give what `_normed` multiplies by; filled by `refresh`."""
        named = self._keep(name, weight)
        gain = torch.empty_like(named) if out is None else out
        self._gains.append((named, gain))
        return gain

    def _fuse(self, prefix: str, modules: dict[str, Any], attribute: str) -> Tensor | None:
        """Concatenate one attribute of several linear modules and name the slices; None if they lack it."""
        parts = {f"{prefix}{name}.{attribute}": getattr(m, attribute) for name, m in modules.items()}
        if any(part is None for part in parts.values()):
            return None
        fused = torch.cat([part.detach() for part in parts.values()])
        start = 0
        for name, part in parts.items():
            self.tensors[name] = fused[start : start + len(part)]
            start += len(part)
        return fused

    def _layer(self, prefix: str, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = {f"self_attn.{n}_proj": getattr(attention, f"{n}_proj") for n in "qkv"}
        gate_up = {f"mlp.{n}_proj": getattr(mlp, f"{n}_proj") for n in ("gate", "up")}
        out, down = {"self_attn.o_proj": attention.o_proj}, {"mlp.down_proj": mlp.down_proj}
        heads_norm = None
        if hasattr(attention, "q_norm"):
            heads_norm = attention.q_norm.weight.new_empty(self.heads + self.kv_heads, self.size)
            self._gain(f"{prefix}self_attn.q_norm.weight", attention.q_norm.weight, heads_norm[: self.heads])
            self._gain(f"{prefix}self_attn.k_norm.weight", attention.k_norm.weight, heads_norm[self.heads :])

        def fuse(modules: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
            weight = self._fuse(prefix, modules, "weight")
            assert weight is not None
            return weight, self._fuse(prefix, modules, "bias")

        return _Layer(
            self._gain(f"{prefix}input_layernorm.weight", layer.input_layernorm.weight),
            *fuse(qkv),
            heads_norm,
            *fuse(out),
            self._gain(f"{prefix}post_attention_layernorm.weight", layer.post_attention_layernorm.weight),
            *fuse(gate_up),
            *fuse(down),
        )

    def _rotary(self, rotary: Any) -> None:
        """Tables over all positions from the model's own module, whatever its scaling."""
        position = torch.arange(self.cache.context, device=self.cache.device)[None]
        cos, sin = rotary(self.embed[:1, None], position)
        half = self.size // 2
        # rotate_half(x) * sin = roll(x, half) * (-sin, sin): one operation less.
        turn = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        self.rope = torch.stack([cos[0], turn], 1)[:, :, None].contiguous()  # (context, 2, 1, head size)

    def refresh(self) -> None:
        """Rebuild what is derived from the named tensors; called after every update."""
        for named, gain in self._gains:
            gain.copy_(named)
            if self.plain:
                gain.mul_(named.shape[-1] ** 0.5)

    def allocate(self) -> None:
        for layer in self.layers:
            layer.cache = self.cache.add(2 * self.kv_heads, self.size)

    def release(self) -> None:
        self.cache.tensors.clear()
        for layer in self.layers:
            layer.cache = None

    # -- forward ---------------------------------------------------------------------------------

    def _run(self, ids_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last layer, before the final norm: (_T, hidden)."""
        x = F.embedding(ids_T, self.embed)
        cos, sin = self.rope.index_select(0, position_T).unbind(1)
        tokens, half, rotated = len(ids_T), self.size // 2, self.heads + self.kv_heads
        shape = (tokens, rotated + self.kv_heads, self.size)
        for layer in self.layers:
            h = self._normed(x, layer.norm)
            qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(shape)
            qk = turned = qkv[:, :rotated]
            if layer.heads_norm is not None:
                turned = self._normed(qk, layer.heads_norm)
            torch.addcmul(turned * cos, turned.roll(half, -1), sin, out=qk)
            x = _add(x, attend(qkv, layer.cache), layer.out, layer.out_bias)  # type: ignore[arg-type]
            h = self._normed(x, layer.mlp_norm)
            gate, up = F.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = _add(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)
        return x

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMS norm over the last dimension; `gain` is the weight as `refresh` prepared it."""
        if not self.plain:
            return F.rms_norm(x, x.shape[-1:], None, self.eps) * gain
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self._floor[x.shape[-1]])).mul_(gain)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self._normed(x, self.norm), self.head).float()

    def decode(self, ids_N: Tensor, spans: list[Span]) -> Tensor:
        """Next-token logits (_N, _V) float32 of one token per row; `spans` cover the rows in order."""
        position, write = _joined(spans)
        group = self.heads // self.kv_heads
        masks = [span.bias.expand(-1, 1, group, -1) for span in spans]

        def attend(qkv: Tensor, cache: Tensor) -> Tensor:
            n = len(qkv)
            cache.view(-1, 2 * self.kv_heads, self.size).index_copy_(0, write, qkv[:, self.heads :])
            q = qkv[:, : self.heads].view(n, self.kv_heads, group, self.size)
            parts = []
            for span, mask in zip(spans, masks, strict=True):
                k, v = span.read(cache).transpose(1, 2).split(self.kv_heads, 1)
                parts.append(F.scaled_dot_product_attention(q[span.rows], k, v, attn_mask=mask))
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(n, -1)

        return self._logits(self._run(ids_N, position, attend))

    def prefill(self, ids_NC: Tensor, span: Span) -> None:
        """Write keys and values of a chunk of prompt; needs no logits."""
        n, columns = ids_NC.shape
        group = self.heads // self.kv_heads
        mask = span.bias.repeat_interleave(group, 2)

        def attend(qkv: Tensor, cache: Tensor) -> Tensor:
            cache.view(-1, 2 * self.kv_heads, self.size).index_copy_(0, span.write_T, qkv[:, self.heads :])
            q = qkv[:, : self.heads].view(n, columns, self.kv_heads, group, self.size)
            q = q.permute(0, 2, 1, 3, 4).reshape(n, self.kv_heads, columns * group, self.size)
            k, v = span.read(cache).transpose(1, 2).split(self.kv_heads, 1)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            o = o.view(n, self.kv_heads, columns, group, self.size).permute(0, 2, 1, 3, 4)
            return o.reshape(n * columns, -1)

        self._run(ids_NC.reshape(-1), span.position_NC.reshape(-1), attend)

    def full(self, ids_T: Tensor) -> Tensor:
        """Logits (_T, _V) float32 of one sequence, without the cache."""

        def attend(qkv: Tensor, cache: Tensor) -> Tensor:
            q, k, v = qkv.transpose(0, 1)[None].split([self.heads, self.kv_heads, self.kv_heads], 1)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return o[0].transpose(0, 1).reshape(len(ids_T), -1)

        return self._logits(self._run(ids_T, torch.arange(len(ids_T), device=ids_T.device), attend))


def _add(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + h @ weight.T (+ bias)."""
    if bias is not None:
        x = x + bias
    return torch.addmm(x, h, weight.t())


def _joined(spans: list[Span]) -> tuple[Tensor, Tensor]:
    """Positions and write indices of all rows."""
    if len(spans) == 1:
        return spans[0].position_NC[:, 0], spans[0].write_T
    return torch.cat([s.position_NC[:, 0] for s in spans]), torch.cat([s.write_T for s in spans])
