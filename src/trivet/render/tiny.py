"""A model small enough to train on a laptop's CPU in a minute, with a character tokenizer of its own.

The conversation format is ChatML without line breaks, and the opening of a turn (`<|im_start|>user`) is one
token, so that a prompt costs three tokens more than its characters: the quick start's time goes into what is
learnt. A character outside the alphabet becomes `<|unk|>` for a plain tokenizer call; trivet's renderer
refuses it by name, so that no prompt loses a letter silently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.recipe.schema import TinyModel
from trivet.render.base import RenderError
from trivet.render.files import quiet, whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, START, UNKNOWN = "<|pad|>", "<|im_end|>", "<|im_start|>", "<|unk|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (PAD, END, START, *(START + role for role in ROLES), UNKNOWN)
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + message['content'] + '<|im_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant' -}}{%- endif -%}"
)
_MARKER = "tiny.json"


def tiny_tokenizer(config: TinyModel) -> PreTrainedTokenizerFast:
    """The special tokens and one token a character of the alphabet, in this order."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    if not config.alphabet:
        raise RenderError("the tiny model's alphabet is empty: list the characters it shall know")
    letters = dict.fromkeys(config.alphabet)  # each once, in the order given
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *letters))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=config.context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _model_config(config: TinyModel, tokenizer: Any) -> Any:
    from transformers import Qwen3Config

    if config.hidden % config.heads or (config.hidden // config.heads) % 2:
        raise RenderError(
            f"tiny model: hidden {config.hidden} over {config.heads} heads must give an even head size"
        )
    if config.heads % config.kv_heads:
        raise RenderError(
            f"tiny model: heads {config.heads} must be a multiple of kv_heads {config.kv_heads}"
        )
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=config.mlp,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden // config.heads,
        max_position_embeddings=config.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        # No pad_token_id: its row would start at zero, and the norm after it would blow up what flows back.
        pad_token_id=None,
        dtype="float32",
    )


def _write(config: TinyModel, directory: Path) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    tokenizer = tiny_tokenizer(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: Any = Qwen3ForCausalLM(_model_config(config, tokenizer)).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with quiet():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / _MARKER).write_text(json.dumps(config.model_dump(), indent=1))


def make_tiny(config: TinyModel, directory: str | Path, *, force: bool = False) -> Path:
    """Write the model of `config` to `directory` (Hugging Face layout) and return it.

    Equal configurations give equal files. A directory that already holds this very model is left alone; one
    that holds anything else is refused, with `force` only where that is no model. Appears whole or not at
    all. Raises RenderError.
    """
    directory = Path(directory)
    if not force and _holds(directory) == config.model_dump():
        return directory
    with whole(directory, force=force) as folder:
        _write(config, folder)
    return directory


def _holds(directory: Path) -> object:
    """The configuration of the tiny model in `directory`, None where there is none that can be read."""
    try:
        return json.loads((directory / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
