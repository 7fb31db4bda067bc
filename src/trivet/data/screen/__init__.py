"""Decontamination and deduplication, for training conversations and for prompts of RL tasks alike."""

from trivet.data.screen.allow import Allow, load_allow
from trivet.data.screen.benchmarks import RECIPES, Benchmark, BenchmarkError, load_benchmark
from trivet.data.screen.chain import Screen, screen_records
from trivet.data.screen.dedup import DedupOptions, ExactFilter, Sketches, resolve, sketch
from trivet.data.screen.documents import Document, document_of, document_of_record
from trivet.data.screen.items import Guards, Item, PreparedItems, prepare_items
from trivet.data.screen.passes import PASSES, make_pass
from trivet.data.screen.report import ScreenReport
from trivet.data.screen.verdicts import Outcome, load_decisions

__all__ = [
    "PASSES",
    "RECIPES",
    "Allow",
    "Benchmark",
    "BenchmarkError",
    "DedupOptions",
    "Document",
    "ExactFilter",
    "Guards",
    "Item",
    "Outcome",
    "PreparedItems",
    "Screen",
    "ScreenReport",
    "Sketches",
    "document_of",
    "document_of_record",
    "load_allow",
    "load_benchmark",
    "load_decisions",
    "make_pass",
    "prepare_items",
    "resolve",
    "screen_records",
    "sketch",
]
