"""How fast contamination is looked for: the phrase scanner against Aho-Corasick.

    python benchmarks/screen.py [--conversations 100000] [--bytes 2000] [--phrases 30000 240000]

Conversations of invented words, into some of which items were planted, are scanned for the sampled 8-word
phrases of as many items as give the phrases asked for. Arms, taking turns in one run on one core: `trivet`
(folding, hashing, comparing), pyahocorasick over normalised text (padded with blanks, which makes it match on
word borders), and the same without the time of normalising. Aho-Corasick sees the first --sample
conversations of every part, since it is slow; both must find the same there. Times are of the processor, so
that a busy machine disturbs little. Prints MB/s per core, the ratios, and peak memory. The comparison needs
pyahocorasick.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

from trivet.data.screen.characters import CharacterIndex
from trivet.data.screen.phrases import PhraseIndex, batches
from trivet.data.screen.words import normalise, phrases, split_words

PARTS = 5
Conversation = tuple[str, ...]


def vocabulary(rng: random.Random, size: int = 30_000) -> list[str]:
    """Invented words of about English lengths."""
    letters = "etaoinshrdlucmfwypvbgk"
    return [
        "".join(rng.choices(letters, k=max(1, round(rng.lognormvariate(1.45, 0.45))))) for _ in range(size)
    ]


def sentence(rng: random.Random, words: list[str], weights: list[float], count: int) -> str:
    chosen = rng.choices(words, cum_weights=weights, k=count)
    for i in range(0, count, 11):
        chosen[i] = chosen[i].capitalize()
        chosen[i - 1] += rng.choice([".", ",", "!", ":\n"])
    return " ".join(chosen)


def make(arguments: argparse.Namespace) -> tuple[list[Conversation], list[str]]:
    """Conversations of two messages, and items of 40 to 120 words; every hundredth conversation holds one."""
    rng = random.Random(arguments.seed)
    words = vocabulary(rng)
    weights, total = [], 0.0
    for rank in range(len(words)):
        total += 1 / (rank + 3)  # Zipf
        weights.append(total)
    items = [
        sentence(rng, words, weights, rng.randrange(40, 120))
        for _ in range(max(arguments.phrases) // 19 + 500)
    ]
    conversations: list[Conversation] = []
    for i in range(arguments.conversations):
        count = round(arguments.bytes / 5.9)
        text = sentence(rng, words, weights, count)
        cut = text.find(" ", len(text) // 4)
        answer = text[cut:] + (f" {rng.choice(items[:1500])}" if i % 100 == 0 else "")
        conversations.append((text[:cut], answer))
    return conversations, items


def size(conversations: Sequence[Conversation]) -> float:
    """Megabytes."""
    return sum(len(text.encode()) for conversation in conversations for text in conversation) / 1e6


def scan(index: PhraseIndex, conversations: Sequence[Conversation]) -> Iterator[tuple[int, str]]:
    start = 0
    for batch in batches(conversations):
        for document, phrase in zip(*index.scan(batch), strict=True):
            yield start + int(document), index.phrase(int(phrase))
        start += len(batch)


def automaton(wanted: Sequence[str]) -> Any:
    ahocorasick: Any = importlib.import_module("ahocorasick")
    out = ahocorasick.Automaton()
    for phrase in wanted:
        out.add_word(f" {phrase} ", phrase)
    out.make_automaton()
    return out


def aho(tree: Any, texts: Sequence[Sequence[str]]) -> set[tuple[int, str]]:
    return {(d, phrase) for d, some in enumerate(texts) for text in some for _, phrase in tree.iter(text)}


def rate(seconds: float, megabytes: float) -> float:
    return megabytes / seconds


def compare(
    conversations: list[Conversation], items: list[str], count: int, sample: int, out: dict[str, Any]
) -> None:
    """One size of index: the arms take turns over the parts of the conversations."""
    wanted = list(dict.fromkeys(phrase for item in items for phrase in phrases([split_words(item)])))[:count]
    began = time.process_time()
    index = PhraseIndex.build(wanted)
    built = time.process_time() - began
    other = importlib.util.find_spec("ahocorasick") is not None
    began = time.process_time()
    tree = automaton(wanted) if other else None
    tree_built = time.process_time() - began
    spent = {"trivet": 0.0, "aho": 0.0, "aho, normalised": 0.0}
    megabytes = {"trivet": 0.0, "aho": 0.0}
    hits = 0
    step = -(-len(conversations) // PARTS)
    for at in range(0, len(conversations), step):
        part = conversations[at : at + step]
        began = time.process_time()
        found = set(scan(index, part))
        spent["trivet"] += time.process_time() - began
        megabytes["trivet"] += size(part)
        hits += len(found)
        if tree is None:
            continue
        few = part[:sample]
        began = time.process_time()
        texts = [[f" {normalise(text)} " for text in conversation] for conversation in few]
        between = time.process_time()
        same = aho(tree, texts)
        ended = time.process_time()
        spent["aho"] += ended - began
        spent["aho, normalised"] += ended - between
        megabytes["aho"] += size(few)
        if same != {pair for pair in found if pair[0] < len(few)}:
            raise SystemExit("the arms found different phrases")
    mine = rate(spent["trivet"], megabytes["trivet"])
    out[str(count)] = mine
    print(f"\n{len(wanted)} phrases, {megabytes['trivet']:.0f} MB, {hits} phrases found")
    print(f"  trivet           {mine:7.1f} MB/s   index {built:.2f} s, {index.nbytes / 1e6:.1f} MB")
    if tree is not None:
        whole = rate(spent["aho"], megabytes["aho"])
        bare = rate(spent["aho, normalised"], megabytes["aho"])
        print(f"  pyahocorasick    {whole:7.1f} MB/s   automaton {tree_built:.2f} s")
        print(f"    without normalising {bare:.1f} MB/s")
        print(f"  ratio            {mine / whole:7.1f}  (to scanning alone: {mine / bare:.1f})")


def characters(conversations: list[Conversation], items: list[str]) -> None:
    """The character windows, on the first fifth."""
    part = conversations[: len(conversations) // PARTS]
    index = CharacterIndex.build([[normalise(item)] for item in items[:1500]])
    began = time.process_time()
    hits = sum(len(found) for batch in batches(part) for found in index.scan(batch))
    seconds = time.process_time() - began
    print(f"\n60-character windows of 1500 items: {rate(seconds, size(part)):.1f} MB/s, {hits} hits")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--bytes", type=int, default=2000)
    parser.add_argument("--phrases", type=int, nargs="+", default=[30_000, 240_000])
    parser.add_argument(
        "--sample", type=int, default=4000, help="conversations of each part for Aho-Corasick"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if importlib.util.find_spec("ahocorasick") is None:
        print("pyahocorasick is not installed: nothing to compare with (pip install pyahocorasick)")
    conversations, items = make(arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    loaded = f"{peak:.0f} MB of memory with them loaded"
    print(f"{len(conversations)} conversations, {size(conversations):.0f} MB; {loaded}")
    rates: dict[str, float] = {}
    for count in arguments.phrases:
        compare(conversations, items, count, arguments.sample, rates)
    if len(rates) > 1:
        first, *rest = rates
        for other in rest:
            print(f"\nrate with {other} phrases / with {first}: {rates[other] / rates[first]:.2f}")
    characters(conversations, items)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB, all arms")


if __name__ == "__main__":
    main()
