"""How new weights get from the trainer to the engines, and the proof that they did."""

from trivet.weights.checksum import checksum, checksums, untie
from trivet.weights.proof import ProofFailed, prove, prove_probe
from trivet.weights.store import DiskStore, MemoryStore, Published, WeightsError, WeightStore

__all__ = [
    "DiskStore",
    "MemoryStore",
    "ProofFailed",
    "Published",
    "WeightStore",
    "WeightsError",
    "checksum",
    "checksums",
    "prove",
    "prove_probe",
    "untie",
]
