"""The embedded engine: any transformers causal LM on CPU or CUDA, in this process."""

from trivet.engine.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
