"""Any transformers causal LM behind the four calls the scheduler needs, and the choice between three paths.

fused      our own forward for the Llama shape (`fused.py`)
cached     the model's own forward over our slots, through the transformers cache interface
recompute  the model's own forward over whole sequences, for models whose state is not keys and values

A path is proved on random ids against the model's plain forward before it is used, so that an unusual
configuration costs speed and never correctness.
"""

from __future__ import annotations

import copy
import inspect
import logging
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import DynamicLayer

from trivet.engine.base import EngineError
from trivet.engine.torch.cache import Cache, Span, decode_spans, prefill_span
from trivet.engine.torch.fused import FusedModel, unsupported
from trivet.weights.moe import Recorder, RoutingError

log = logging.getLogger(__name__)

_PROBE = 12  # tokens of the proof, at least
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # of log-probabilities; others: 0.25


class Model(Protocol):
    """Forward passes over cached slots. `tensors` are the weights by Hugging Face name, as views into the
    model's own storage; `aliases` maps a tied tensor's second name to its first."""

    cache: Cache
    vocab: int
    grouped: bool
    tensors: dict[str, Tensor]
    aliases: dict[str, str]

    def refresh(self) -> None: ...
    def allocate(self) -> None: ...
    def release(self) -> None: ...
    def prefill(self, ids_NC: Tensor, span: Span) -> None: ...
    def decode(self, ids_N: Tensor, spans: list[Span]) -> Tensor: ...
    def full(self, ids_T: Tensor) -> Tensor: ...


class _Module:
    """What the two generic paths share: the transformers module and its weights."""

    grouped = False

    def __init__(self, model: Any, cache: Cache) -> None:
        self.model, self.cache, self.vocab = model, cache, model.get_input_embeddings().weight.shape[0]
        by_pointer: dict[tuple[int, tuple[int, ...]], str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            first = by_pointer.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
            if first == name:
                self.tensors[name] = tensor.detach()
            else:
                self.aliases[name] = first

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def full(self, ids_T: Tensor) -> Tensor:
        """Logits (_T, _V) float32 of one sequence, without the cache."""
        return self.model(input_ids=ids_T[None], use_cache=False).logits[0].float()


class _SlotCache(HFCache):
    """Gives transformers our slots: `update` writes the new keys and values and returns what may be read."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.slots = cache
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self.span: Span | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Keys and values (_N, heads, _C, size) in, (_N, heads, length, size) out."""
        assert self.span is not None
        if layer_idx not in self.pairs:
            keys = self.slots.add(key_states.shape[1], key_states.shape[3], dtype=key_states.dtype)
            values = self.slots.add(value_states.shape[1], value_states.shape[3], dtype=value_states.dtype)
            self.pairs[layer_idx] = keys, values
        out = []
        for tensor, new in zip(self.pairs[layer_idx], (key_states, value_states), strict=True):
            entries = new.transpose(1, 2).reshape(-1, *tensor.shape[2:])
            tensor.view(-1, *tensor.shape[2:]).index_copy_(0, self.span.write_T, entries)
            out.append(self.span.read(tensor).transpose(1, 2))
        return out[0], out[1]

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return 0  # positions and masks are always given explicitly


class CachedModel(_Module):
    """The module's own forward, keys and values in our slots."""

    def __init__(self, model: Any, cache: Cache) -> None:
        super().__init__(model, cache)
        accepted = inspect.signature(model.forward).parameters
        # Renamed in transformers 5; both spellings are in use across models.
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"
        self.keep_last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.window = sliding_window(model.config, cache.context)
        self.by_layer = getattr(model.config.get_text_config(), "layer_types", None) is not None
        self.allocate()

    def allocate(self) -> None:
        self.slot_cache = _SlotCache(self.cache)  # tensors are made at the first forward, layer by layer

    def release(self) -> None:
        self.cache.tensors.clear()
        self.slot_cache.pairs.clear()

    def _forward(self, ids_NC: Tensor, span: Span) -> Tensor:
        self.slot_cache.span = span
        arguments = {self.cache_name: self.slot_cache, "use_cache": True, **self.keep_last}
        return self.model(
            input_ids=ids_NC,
            attention_mask=self._mask(span),
            position_ids=span.position_NC,
            **arguments,
        ).logits[:, -1]

    def _mask(self, span: Span) -> Any:
        """(_N, 1, _C, length), or one for each kind of layer. transformers takes a mask of four dimensions as
        it is, for every layer: windows have to be in it."""
        full = span.bias.to(self.model.dtype)
        if self.window is None:
            return full
        windowed = span.sliding(self.window).to(self.model.dtype)
        return {"full_attention": full, "sliding_attention": windowed} if self.by_layer else windowed

    def prefill(self, ids_NC: Tensor, span: Span) -> None:
        self._forward(ids_NC, span)

    def decode(self, ids_N: Tensor, spans: list[Span]) -> Tensor:
        (span,) = spans
        return self._forward(ids_N[:, None], span).float()


class RecomputeModel(_Module):
    """The module's own forward over whole sequences; what is cached are the ids. Slow, and always right."""

    def __init__(self, model: Any, cache: Cache) -> None:
        super().__init__(model, cache)
        self.allocate()

    def allocate(self) -> None:
        self.ids = self.cache.add(dtype=torch.int64)

    def release(self) -> None:
        self.cache.tensors.clear()

    def prefill(self, ids_NC: Tensor, span: Span) -> None:
        self.ids.view(-1).index_copy_(0, span.write_T, ids_NC.reshape(-1))

    def decode(self, ids_N: Tensor, spans: list[Span]) -> Tensor:
        (span,) = spans
        self.ids.view(-1).index_copy_(0, span.write_T, ids_N)
        rows = []
        for ids, end in zip(span.read(self.ids), (span.position_NC[:, 0] + 1).tolist(), strict=True):
            # One by one: padding is not neutral for every recurrent model.
            rows.append(self.full(ids[:end])[-1])
        return torch.stack(rows)


def recorder(model: Model) -> Recorder:
    """Records which experts each decoded token goes through. Raises RoutingError where that cannot be had."""
    if not isinstance(model, CachedModel):
        raise RoutingError(
            f"engine.routes: {type(model).__name__} samples this model; routes are recorded on the cached "
            "path only (a mixture of experts that transformers can cache)"
        )
    return Recorder(model.model)


def sliding_window(config: Any, context: int) -> int | None:
    """Positions a windowed layer sees, None where no layer hides anything within `context`."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not isinstance(window, int) or not 0 < window < context:
        return None
    return window if kinds is None or "sliding_attention" in kinds else None


def load(source: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A transformers module of our own: read from a directory, or copied from a module that others train."""
    if isinstance(source, str | Path):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(source), dtype=dtype, attn_implementation="sdpa")
    else:
        model = copy.deepcopy(source)
        for parameter in model.parameters():
            parameter.grad = None  # copied along
        if model.config._attn_implementation not in ("eager", "sdpa"):
            # A trainer's own, say: it works on packed rows and nowhere else.
            model.set_attn_implementation("sdpa")
    module: Any = model  # transformers' own annotation of `to` is wrong
    return module.to(device=device, dtype=dtype).eval().requires_grad_(False)


def build(
    source: Any, *, slots: int, context: int, device: torch.device, dtype: torch.dtype, fused: bool
) -> Model:
    """The fastest path whose log-probabilities equal the model's own. Raises EngineError if none does."""
    module = load(source, device, dtype)
    window = getattr(module.config, "max_position_embeddings", None)
    if window is not None and context > window:
        raise EngineError(
            f"engine.context is {context}, but {type(module).__name__} knows positions up to {window} only: "
            f"set engine.context to at most {window}"
        )
    kinds: list[type] = [CachedModel, RecomputeModel]
    if fused:
        reason = unsupported(module, context)
        if reason is None:
            kinds.insert(0, FusedModel)
        else:
            log.info("fused path not used: %s", reason)
    with torch.inference_mode():
        # A window is proved beyond its edge: closer to the start it hides nothing.
        tokens = min(max(_PROBE, (sliding_window(module.config, context) or 0) + 4), context)
        expected, ids = _reference(module, device, tokens)
        for kind in kinds:
            model, gap = _try(kind, module, Cache(slots, context, dtype, device), ids, expected)
            if model is not None:
                return model
            log.warning("%s does not fit %s: %s", kind.__name__, type(module).__name__, gap)
    raise EngineError(f"no engine path reproduces the forward of {type(module).__name__}; last: {gap}")


def _reference(module: Any, device: torch.device, tokens: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities (_T, _V) of random ids by the module's plain forward, and the ids (_T,)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(module.config.vocab_size, (tokens,), generator=generator).to(device)
    logits = module(input_ids=ids[None], use_cache=False).logits[0].float()
    return logits.log_softmax(-1), ids


def _try(kind: type, module: Any, cache: Cache, ids: Tensor, expected: Tensor) -> tuple[Any, str]:
    """A model of this kind if it agrees with `expected`, else None and what went wrong."""
    try:
        model = kind(module, cache)
        if kind is FusedModel:
            model.allocate()
        gap = _gap(model, ids, expected)
    except Exception as error:  # whatever a foreign forward raises on our cache: the next path is tried
        return None, f"{type(error).__name__}: {error}"
    if not gap <= _TOLERANCE.get(cache.dtype, 0.25):
        return None, f"log-probabilities differ by {gap:.2g}"
    return model, ""


def _gap(model: Model, ids: Tensor, expected: Tensor) -> float:
    """Largest difference of log-probabilities: two chunks of prefill and a decoded token; `full`."""
    cache, n = model.cache, len(ids)
    count = min(n, cache.context) - 1
    half = count // 2
    for start, end in ((0, half), (half, count)):
        if end > start:
            at = np.array([start]), np.array([end - start])
            model.prefill(ids[None, start:end], prefill_span(cache, np.array([0]), *at, end - start, end))
    spans = decode_spans(cache, np.array([count]), 1, [(0, 1, count + 1)])
    decoded = model.decode(ids[count : count + 1], spans)[0].log_softmax(-1)
    full = model.full(ids).log_softmax(-1)
    gaps = (decoded - expected[count]).abs().max(), (full - expected).abs().max()
    return float(torch.stack(gaps).max())
